// What every command gets: the global flags, where to print, and how to reach the controller.
//
// A command is a function that registers its flags and a body:
//
//   void AddList(CLI::App& app, Session& session) {
//     auto flags = std::make_shared<Flags>();
//     CLI::App* command = app.add_subcommand("list", "list jobs");
//     command->add_option("--owner", flags->owner, "…");
//     command->callback([&session, flags] { session.Run([&] { return List(session, *flags); }); });
//   }
//
// Bodies return an exit code; errors go through Session::Fail, which prints them once, with the
// violations of their detail.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "base/signals.h"
#include "cli/client.h"
#include "cli/exit_codes.h"

namespace octavo {

enum class OutputFormat { kTable, kJson };

class Session {
 public:
  Session(std::ostream& out, std::ostream& err) : out_(out), err_(err) {}

  std::ostream& out() { return out_; }
  std::ostream& err() { return err_; }
  bool json() const { return format == OutputFormat::kJson; }

  // Registered by the parser, executed after it: a command runs once, when all flags are known.
  void Run(std::function<int()> body) { body_ = std::move(body); }
  int Execute();

  // The controller's client, made on first use.
  absl::StatusOr<Client*> client();

  // From here on Ctrl-C is something that a follow sees. Call before client(): threads that gRPC
  // starts inherit it. Null when this process does not handle signals (tests).
  const StopSignals* BlockSignals();

  // Prints the error and returns its exit code.
  int Fail(const absl::Status& status);

  // Global flags.
  ClientOptions options;
  OutputFormat format = OutputFormat::kTable;
  bool is_terminal = false;  // stdout is one (and TERM is not dumb)
  int terminal_width = 80;
  bool handles_signals = false;  // Ctrl-C ends a follow instead of the process

 private:
  std::ostream& out_;
  std::ostream& err_;
  std::function<int()> body_;
  std::unique_ptr<StopSignals> signals_;
  std::unique_ptr<Client> client_;
};

}  // namespace octavo
