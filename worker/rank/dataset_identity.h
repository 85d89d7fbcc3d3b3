// What tells one dataset from another without reading it whole; kept in every checkpoint.
#pragma once

#include "absl/status/statusor.h"
#include "worker/checkpoint/manifest.h"
#include "worker/data/token_dataset.h"

namespace octavo {

// Format, token count and a fingerprint: of the checksum that the file carries where it has one,
// else of up to a quarter of a million tokens, spread evenly and with both ends (1 MiB), and the
// number of documents. Of a blend: of its parts in order with their weights. The same on every
// rank; the file's path is no part of it. Errors: those of reading.
absl::StatusOr<DatasetIdentity> IdentifyDataset(const TokenDataset& dataset);

}  // namespace octavo
