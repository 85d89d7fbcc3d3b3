// A rank without numbers: speaks RankService as octavo-rank does. Its job uid says how it behaves:
//   finish*     three steps, a last word, exit 0
//   train*      a step every few milliseconds until a stop wish: checkpoint, last word, exit 0
//   crash*      says hello, writes "about to crash" to its log and aborts
//   stubborn*   says hello, then ignores wishes and SIGTERM
//   meet*       sets the key "rank<r>", gets "rank<1-r>", and says its value as last word
#pragma once

namespace octavo {

// The command line of worker/agent/rank_host.h.
int FakeRankMain(int argc, char** argv);

}  // namespace octavo
