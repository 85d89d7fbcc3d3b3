#include <algorithm>

#include "base/clock.h"
#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/live.h"
#include "cli/output/table.h"
#include "cli/output/text.h"
#include "proto/convert/job.h"

namespace octavo {
namespace {

struct Flags {
  std::string job;
  bool spec = false;
};

std::string Labels(const v1::JobSpec& spec) {
  std::vector<std::string> labels;
  for (const auto& [key, value] : spec.labels()) {
    labels.push_back(key + "=" + value);
  }
  std::sort(labels.begin(), labels.end());
  return StrJoin(labels, ", ");
}

std::string Model(const v1::ModelSpec& model) {
  const v1::MoeSpec& moe = model.moe();
  std::string text =
      StrCat(model.family(), ", ", model.layers(), " layers, hidden ", model.hidden(), ", ",
             model.heads(), "/", model.kv_heads(), " heads, ", moe.num_experts(), " experts of ",
             moe.expert_hidden(), ", top-", moe.experts_per_token());
  if (moe.shared_experts() > 0) {
    StrAppend(&text, ", ", moe.shared_experts(), " shared of ", moe.shared_expert_hidden());
  }
  if (model.dense_layers_size() > 0) {
    std::vector<std::string> layers;
    for (const std::int32_t layer : model.dense_layers()) {
      layers.push_back(std::to_string(layer));
    }
    StrAppend(&text, ", dense layers ", StrJoin(layers, ", "), " (hidden ", model.dense_hidden(),
              ")");
  }
  return text;
}

std::string Router(const v1::RouterSpec& router) {
  std::string text = StrCat(router.score(), ", auxiliary loss ", router.aux_loss());
  if (router.aux_loss() != "none") {
    StrAppend(&text, " x ", router.aux_loss_coefficient());
  }
  if (router.n_group() > 1) {
    StrAppend(&text, ", best ", router.topk_group(), " of ", router.n_group(), " expert groups");
  }
  if (router.routed_scaling_factor() != 1) {
    StrAppend(&text, ", weights x ", router.routed_scaling_factor());
  }
  if (router.bias_update_rate() > 0) {
    StrAppend(&text, ", selection bias moves by ", router.bias_update_rate());
  }
  if (router.z_loss_coefficient() > 0) {
    StrAppend(&text, ", z-loss x ", router.z_loss_coefficient());
  }
  return text;
}

void PrintAttempts(Session& session, const v1::Job& job) {
  if (job.attempts().empty()) {
    return;
  }
  Table table({{"ATTEMPT", Align::kRight},
               {"STARTED"},
               {"ENDED"},
               {"STEPS"},
               {"FROM STEP", Align::kRight},
               {"RANKS ON"},
               {"END"}});
  for (const v1::Attempt& attempt : job.attempts()) {
    std::vector<std::string> places;
    for (const v1::Placement& placement : attempt.placements()) {
      places.push_back(
          StrCat(placement.rank(), ":", BareName(placement.worker()), "#", placement.slot()));
    }
    const bool classified = attempt.end_class() != v1::FAILURE_CLASS_UNSPECIFIED;
    std::string end = classified ? v1::FailureClass_Name(attempt.end_class()) : std::string();
    if (!attempt.end_reason().empty()) {
      StrAppend(&end, end.empty() ? "" : ": ", attempt.end_reason());
    }
    table.AddRow({std::to_string(attempt.number()), Rfc3339(attempt.start_time()),
                  attempt.has_end_time() ? Rfc3339(attempt.end_time()) : "-",
                  StrCat(attempt.first_step(), "-", attempt.last_step()),
                  std::to_string(attempt.loaded_checkpoint_step()), StrJoin(places, " "), end});
  }
  session.out() << "\n" << table.Render();
}

void PrintJob(Session& session, const v1::Job& job) {
  KeyValues lines;
  lines.Add("job", job.name());
  lines.Add("uid", job.uid());
  lines.Add("owner", job.spec().owner());
  lines.Add("labels", Labels(job.spec()));
  lines.Add("state", v1::JobState_Name(job.state()));
  if (job.failure() != v1::FAILURE_CLASS_UNSPECIFIED) {
    lines.Add("failure", v1::FailureClass_Name(job.failure()));
    if (const auto failure = FromWire(job.failure())) {
      lines.Add("advice", std::string(Advice(*failure)));
    }
  }
  lines.Add("message", job.message());
  if (job.has_pending() && job.pending().reason() != v1::PENDING_REASON_UNSPECIFIED) {
    lines.Add("waiting", StrCat(v1::PendingReason_Name(job.pending().reason()), ": ",
                                job.pending().sentence()));
  }
  lines.Add("priority", std::to_string(job.spec().priority()));
  lines.Add("model", Model(job.spec().model()));
  lines.Add("router", Router(job.spec().model().moe().router()));
  lines.Add("parallel", StrCat(job.spec().parallel().ranks(), " ranks on ", job.spec().device(),
                               ", expert_parallel ", job.spec().parallel().expert_parallel()));
  lines.Add("progress", ProgressText(job));
  if (job.progress().step() > 0) {
    lines.Add("FP8 share", PercentText(job.progress().fp8_flop_share()));
    lines.Add("all-to-all", HumanBytes(static_cast<double>(job.progress().all_to_all_bytes())));
    lines.Add("plan version", std::to_string(job.progress().plan_version()));
  }
  if (!job.progress().checkpoint_path().empty()) {
    lines.Add("checkpoint", StrCat(job.progress().checkpoint_path(), " (step ",
                                   job.progress().checkpoint_step(), ")"));
  }
  // The failure that ended the job is counted, but no restart followed it.
  const std::int32_t allowed = job.spec().restart().max();
  lines.Add("restarts", StrCat(std::min(job.restarts(), allowed), " of ", allowed,
                               job.restarts() > allowed ? ", used up" : ""));
  lines.Add("created", Rfc3339(job.create_time()));
  lines.Add("ended", job.has_end_time() ? Rfc3339(job.end_time()) : "");
  lines.Add("etag", job.etag());
  session.out() << lines.Render();
  PrintAttempts(session, job);
}

int Describe(Session& session, const Flags& flags) {
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  v1::GetJobRequest request;
  request.set_name(JobResource(flags.job));
  const absl::StatusOr<v1::Job> job = (*client)->Call(&JobStub::GetJob, request);
  if (!job.ok()) {
    return session.Fail(job.status());
  }
  if (flags.spec) {
    session.out() << job->spec_yaml();
  } else if (session.json()) {
    session.out() << ToJson(*job);
  } else {
    PrintJob(session, *job);
  }
  return kExitOk;
}

}  // namespace

void AddDescribe(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("describe", "everything about one job");
  command->add_option("job", flags->job, "name of the job")->required();
  command->add_flag("--spec", flags->spec, "only the YAML as submitted");
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Describe(session, *flags); }); });
}

}  // namespace octavo
