// Programs that are installed beside `octavo` and do what it does not link: octavo-rank (kernels)
// and octavo-tokenizer (SentencePiece).
#pragma once

#include <string>
#include <vector>

#include "cli/session.h"

namespace octavo {

// Runs the program to its end with this process's standard output and error; Ctrl-C reaches both.
// Returns its exit code, which is one of exit_codes.h; a program that is missing or was killed is
// reported like any error.
int RunProgram(Session& session, const std::string& name, std::vector<std::string> arguments);

}  // namespace octavo
