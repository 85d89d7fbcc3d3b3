// Which rank stores what, and under which name: pure, the same answer on every rank.
//
// Every tensor is stored once. Names do not depend on how the job was spread, so reading with other
// ranks or another expert-parallel size is a look-up by name and nothing more:
//   <parameter>/master, /m, /v            a replicated parameter, whole
//   <parameter>#<expert>/master, /m, /v   one expert of an expert parameter, by its global id
//   state/<name>                          precision windows and balance biases (FP32)
// Replicated parameters go to the rank with the least to write so far; an expert goes to one of the
// ranks that hold it, in turn.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "worker/model/parameters.h"

namespace octavo {

// A piece of a parameter as it is stored: a whole tensor or one expert of it.
struct ShardPiece {
  std::string base;              // "<parameter>" or "<parameter>#<expert>"
  std::int32_t parameter = 0;    // index in the table
  std::int64_t local_first = 0;  // first element, counted in this rank's buffer of the parameter
  std::int64_t count = 0;
  std::vector<std::int64_t> shape;  // of the piece
  std::int32_t owner = 0;           // rank that stores it
};

struct ShardLayout {
  std::int32_t world_size = 1, expert_parallel = 1, rank = 0;
};

// The pieces that `layout.rank` holds, in table order. A rank writes those it owns and reads all.
std::vector<ShardPiece> HeldPieces(const std::vector<Parameter>& parameters,
                                   const ShardLayout& layout);

// Whether this rank stores a state tensor that it exported: experts' are stored by the first group
// that holds them, others by rank 0.
bool StoresState(bool expert, const ShardLayout& layout);

}  // namespace octavo
