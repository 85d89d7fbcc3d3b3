// `octavo-rank --offline eval|generate …`: the command line of offline.h, started by `octavo eval`
// and `octavo generate`.
#pragma once

namespace octavo {

// Whether argv asks for it: its first argument is --offline.
bool IsOffline(int argc, char** argv);
// Returns the process's exit code, one of the octavo command's.
int OfflineMain(int argc, char** argv);

}  // namespace octavo
