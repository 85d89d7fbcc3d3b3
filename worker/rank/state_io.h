// Between the model in device memory and a checkpoint's tensors by name.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "kernels/ops.h"
#include "worker/checkpoint/reader.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/checkpoint/writer.h"
#include "worker/model/transformer.h"

namespace octavo {

// Copies of all that this rank stores: FP32 masters, moments, precision state. Waits for the
// device.
// `buffers` are those of an earlier copy (ShardWriter::TakeBuffers) or empty.
std::vector<OwnedTensor> CopyOwnedState(Transformer& model, const Backend& backend,
                                        const ShardLayout& layout,
                                        std::vector<OwnedTensor> buffers);

// Fills parameters, moments and precision state from the checkpoint, whatever ranks wrote it.
// Between tensors it asks `interrupted`; true ends it early with CANCELLED. DATA_LOSS names the
// tensor.
absl::Status LoadState(const CheckpointReader& reader, Transformer& model, const Backend& backend,
                       const ShardLayout& layout, const std::function<bool()>& interrupted);

// Weights alone, for a job that begins with somebody else's (checkpoint.start_from): parameters and
// balance biases; moments and windows stay as they are. Otherwise like LoadState.
absl::Status LoadWeights(const CheckpointReader& reader, Transformer& model, const Backend& backend,
                         const ShardLayout& layout, const std::function<bool()>& interrupted);

}  // namespace octavo
