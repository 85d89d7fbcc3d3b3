// Answers LogRequest from a rank's captured log, a bounded chunk at a time. Never waits for more.
#pragma once

#include <string>

#include "worker/agent/rank_key.h"

namespace octavo {

// `ranks_folder` is <state-dir>/ranks. attempt <= 0 means the newest on this host.
//   offset >= 0   from there, at most max_bytes (0: the limit of proto/limits.h)
//   tail_lines    > 0 (and offset 0): start that many lines before the end
// `end` says that the chunk reaches what the file holds now; a follower asks again from
// next_offset.
iv1::LogReply ReadLogChunk(const iv1::LogRequest& request, const std::string& ranks_folder);

}  // namespace octavo
