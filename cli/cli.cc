#include "cli/cli.h"

#include <CLI/CLI.hpp>
#include <map>

#include "base/str.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/session.h"
#include "cli/validators.h"
#include "proto/spec/violation.h"

namespace octavo {
namespace {

void AddGlobalFlags(CLI::App& app, Session& session) {
  ClientOptions& options = session.options;
  constexpr const char* kGroup = "Connection";
  app.add_option("--controller", options.controller, "address of the controller")
      ->envname("OCTAVO_CONTROLLER")
      ->check(NotEmpty())
      ->capture_default_str()
      ->group(kGroup);
  app.add_option("--timeout", options.timeout_seconds, "seconds that one call may take")
      ->check(FiniteRange(0.1, 3600.0))
      ->capture_default_str()
      ->group(kGroup);
  app.add_option("--tls-ca", options.tls_ca, "PEM file: the authority of the controller")
      ->envname("OCTAVO_TLS_CA")
      ->group(kGroup);
  app.add_option("--tls-cert", options.tls_cert, "PEM file: this client's certificate")
      ->envname("OCTAVO_TLS_CERT")
      ->group(kGroup);
  app.add_option("--tls-key", options.tls_key, "PEM file: its private key")
      ->envname("OCTAVO_TLS_KEY")
      ->group(kGroup);
  app.add_option("--tls-server-name", options.tls_server_name,
                 "name in the controller's certificate, when it is not its address")
      ->envname("OCTAVO_TLS_SERVER_NAME")
      ->group(kGroup);
  app.add_option("--token-file", options.token_file, "file with the bearer token")
      ->envname("OCTAVO_TOKEN_FILE")
      ->group(kGroup);
  const std::map<std::string, OutputFormat> formats = {{"table", OutputFormat::kTable},
                                                       {"json", OutputFormat::kJson}};
  app.add_option("-o,--output", session.format, "table (for people) or json (for scripts)")
      ->transform(OneOf(formats))
      ->option_text("table|json");
}

// The deepest command given that still wants one of its own; null: none does.
const CLI::App* WantsCommand(const CLI::App& app) {
  const std::vector<CLI::App*> given = app.get_subcommands();
  if (!given.empty()) {
    return WantsCommand(*given.front());
  }
  return app.get_require_subcommand_min() > 0 ? &app : nullptr;
}

// "unknown command \"subm\"; did you mean \"submit\"?"; empty when the mistake is another one.
std::string UnknownCommand(const CLI::App& app) {
  const CLI::App* wants = WantsCommand(app);
  const std::vector<std::string> rest = app.remaining(/*recurse=*/true);
  if (wants == nullptr || rest.empty() || StartsWith(rest.front(), "-")) {
    return {};
  }
  std::vector<std::string> names;
  for (const CLI::App* command : wants->get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  const std::string near = Suggestion(rest.front(), names);
  return StrCat("error: unknown command ", Quoted(rest.front()),
                near.empty() ? "; valid: " + StrJoin(names, ", ") : near, "\n");
}

}  // namespace

int RunCli(const std::vector<std::string>& arguments, const CliEnvironment& environment,
           std::ostream& out, std::ostream& err) {
  Session session(out, err);
  session.is_terminal = environment.is_terminal;
  session.terminal_width = environment.terminal_width;
  session.handles_signals = environment.handles_signals;

  CLI::App app(
      "Octavo trains mixture-of-experts models in FP8. Jobs are described in YAML\n"
      "(octavo spec-reference) and run by workers under one controller.",
      "octavo");
  app.require_subcommand(1);
  app.fallthrough();  // global flags may stand after the command
  app.footer(kExitCodesHelp);
  AddGlobalFlags(app, session);
  for (auto add :
       {AddSubmit,    AddList,       AddDescribe,      AddWatch,     AddCancel,  AddSuspend,
        AddResume,    AddCheckpoint, AddProfile,       AddLogs,          AddEvents, AddExplain, AddFp8,    AddWorkers, AddDrain,
        AddPrecision, AddData,       AddCheckpoints,   AddExport,    AddImport,  AddEval,
        AddGenerate,  AddVersion,    AddSpecReference, AddCompletion}) {
    add(app, session);
  }
  try {
    std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
    app.parse(reversed);
  } catch (const CLI::ParseError& error) {
    // Help is a success; everything else is a wrong command line.
    if (const std::string unknown = error.get_exit_code() == 0 ? "" : UnknownCommand(app);
        !unknown.empty()) {
      err << unknown;
      return kExitUsage;
    }
    return app.exit(error, out, err) == 0 ? kExitOk : kExitUsage;
  }
  return session.Execute();
}

}  // namespace octavo
