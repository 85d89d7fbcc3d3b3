// The job of the core's tests: complete, small, valid.
#pragma once

#include <string>

#include "octavo/v1/job.pb.h"
#include "proto/spec/job_spec.h"

namespace octavo {

// `edit` changes it before defaults are filled in.
template <class Edit>
v1::JobSpec TestSpec(const std::string& name, Edit edit) {
  v1::JobSpec spec;
  spec.set_name(name);
  spec.mutable_model()->set_family("mixtral");
  spec.mutable_model()->set_layers(4);
  spec.mutable_model()->set_hidden(128);
  spec.mutable_model()->set_heads(2);
  spec.mutable_model()->set_vocab_size(256);
  spec.mutable_model()->mutable_moe()->set_num_experts(8);
  spec.mutable_model()->mutable_moe()->set_experts_per_token(2);
  spec.mutable_model()->mutable_moe()->set_expert_hidden(128);
  spec.mutable_parallel()->set_ranks(2);
  spec.mutable_train()->set_steps(100);
  spec.mutable_train()->set_sequence_length(64);
  spec.mutable_train()->set_global_batch(4);
  spec.mutable_data()->set_path("/data/x");
  spec.mutable_checkpoint()->set_path("/ckpt/" + name);
  spec.mutable_precision()->set_recipe("fp8_flow");
  edit(spec);
  ApplyDefaults(&spec);
  return spec;
}

}  // namespace octavo
