// octavo: the command-line client.
#include <grpc/support/log.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string_view>

#include "cli/cli.h"

namespace {

// gRPC logs connection failures to stderr on its own; our error message says the same once.
void DropGrpcLog(gpr_log_func_args*) {}

}  // namespace

int main(int argc, char** argv) {
  if (std::getenv("OCTAVO_GRPC_LOG") == nullptr) {
    gpr_set_log_function(DropGrpcLog);
  }
  octavo::CliEnvironment environment;
  environment.handles_signals = true;
  const char* term = std::getenv("TERM");
  environment.is_terminal =
      isatty(STDOUT_FILENO) == 1 && term != nullptr && std::string_view(term) != "dumb";
  winsize size{};
  if (environment.is_terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    environment.terminal_width = size.ws_col;
  }
  return octavo::RunCli({argv + 1, argv + argc}, environment, std::cout, std::cerr);
}
