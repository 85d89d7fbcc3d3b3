// The program without its process: arguments in, text and exit status out.
#pragma once

#include <ostream>
#include <string>
#include <vector>

namespace octavo {

struct CliEnvironment {
  bool is_terminal = false;
  int terminal_width = 80;
  bool handles_signals = false;
};

// `arguments` without the program's name. Never throws.
int RunCli(const std::vector<std::string>& arguments, const CliEnvironment& environment,
           std::ostream& out, std::ostream& err);

}  // namespace octavo
