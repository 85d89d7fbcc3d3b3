// octavo precision auto|pin|replay: the policy of a job, and what another one would have done.
#include <fstream>
#include <sstream>

#include "base/status.h"
#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/table.h"
#include "cli/output/text.h"
#include "cli/precision_parts.h"
#include "proto/limits.h"
#include "proto/spec/job_spec.h"

namespace octavo {
namespace {

struct Flags {
  std::string word, job, layers, reason, etag, request_id, policy_file;
  std::vector<std::string> ops;
};

int Send(Session& session, const Flags& flags, v1::SetPolicyRequest::Action action) {
  v1::SetPolicyRequest request;
  request.set_name(JobResource(flags.job));
  request.set_request_id(flags.request_id.empty() ? NewRequestId() : flags.request_id);
  request.set_etag(flags.etag);
  request.set_reason(flags.reason);
  request.set_action(action);
  request.set_layers(flags.layers);
  for (const std::string& op : flags.ops) {
    request.add_ops(op);
  }
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  const absl::StatusOr<v1::JobPrecision> answer = (*client)->Call(&JobStub::SetPolicy, request);
  if (!answer.ok()) {
    return session.Fail(answer.status());
  }
  if (session.json()) {
    session.out() << ToJson(*answer);
    return kExitOk;
  }
  session.out() << "policy " << (answer->policy_enabled() ? "on" : "off") << "\n"
                << PolicySitesText(*answer);
  if (action == v1::SetPolicyRequest::PIN) {
    std::string command = StrCat("octavo precision auto on ", BareName(flags.job));
    if (!flags.layers.empty()) {
      StrAppend(&command, " --layers ", flags.layers);
    } else {
      StrAppend(&command, " --layers 0-", answer->plan().layers() - 1);
    }
    if (!flags.ops.empty()) {
      StrAppend(&command, " --ops ", StrJoin(flags.ops, ","));
    }
    session.out() << "pinned ops stay as they are; back to the policy: " << command << "\n";
  }
  return kExitOk;
}

int Auto(Session& session, const Flags& flags) {
  return Send(session, flags,
              flags.word == "on" ? v1::SetPolicyRequest::ON : v1::SetPolicyRequest::OFF);
}

int Pin(Session& session, const Flags& flags) {
  return Send(session, flags, v1::SetPolicyRequest::PIN);
}

int Replay(Session& session, const Flags& flags) {
  v1::ReplayPolicyRequest request;
  request.set_name(JobResource(flags.job));
  if (!flags.policy_file.empty()) {
    std::ifstream in(flags.policy_file);
    std::ostringstream text;
    text << in.rdbuf();
    if (!in) {
      return session.Fail(NotFoundError(StrCat("reading the policy ", flags.policy_file,
                                               ": it does not exist or cannot be read")));
    }
    absl::StatusOr<v1::PolicySpec> policy = ParsePolicySpec(text.str(), flags.policy_file);
    if (!policy.ok()) {
      return session.Fail(policy.status());
    }
    *request.mutable_policy() = *std::move(policy);
  }
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  const absl::StatusOr<v1::ReplayPolicyResponse> replay =
      (*client)->Call(&JobStub::ReplayPolicy, request);
  if (!replay.ok()) {
    return session.Fail(replay.status());
  }
  session.out() << (session.json() ? ToJson(*replay) : ReplayText(*replay));
  return kExitOk;
}

}  // namespace

std::string PolicySitesText(const v1::JobPrecision& precision) {
  Table table({{"LAYER", Align::kRight},
               {"OP"},
               {"STATUS"},
               {"FELL FROM"},
               {"CAUSE"},
               {"AT STEP", Align::kRight},
               {"HOLD", Align::kRight},
               {"RELAPSES", Align::kRight}});
  for (const v1::PolicySite& site : precision.sites()) {
    const bool fell = !site.original().empty();  // else an operator holds it
    table.AddRow({std::to_string(site.layer()), site.op(), site.status(), site.original(),
                  site.cause(), fell ? std::to_string(site.since_step()) : "",
                  fell ? std::to_string(site.hold_steps()) : "",
                  fell ? std::to_string(site.relapses()) : ""});
  }
  return table.empty() ? "" : table.Render();
}

std::string ReplayText(const v1::ReplayPolicyResponse& replay) {
  std::string text =
      StrCat("replayed ", replay.snapshots(), " snapshots and ", replay.steps(), " steps (",
             replay.first_step(), " to ", replay.last_step(), "): ", replay.decisions_size(),
             replay.decisions_size() == 1 ? " decision\n" : " decisions\n");
  Table table({{"STEP", Align::kRight},
               {"DECISION"},
               {"LAYER", Align::kRight},
               {"OP"},
               {"SIGNAL"},
               {"WHY", Align::kLeft, 200}});
  for (const v1::PolicyDecision& decision : replay.decisions()) {
    table.AddRow({std::to_string(decision.step()), decision.direction(),
                  std::to_string(decision.layer()), decision.op(), decision.signal(),
                  decision.reason()});
  }
  if (!table.empty()) {
    StrAppend(&text, table.Render());
  }
  for (const std::string& alert : replay.alerts()) {
    StrAppend(&text, "alert: ", Printable(alert), "\n");
  }
  return text;
}

void AddPrecisionPolicy(CLI::App& group, Session& session) {
  auto flags = std::make_shared<Flags>();
  const auto add = [&](const char* name, const char* help, int (*body)(Session&, const Flags&)) {
    CLI::App* command = group.add_subcommand(name, help);
    command->callback([&session, flags, body] {
      session.Run([&session, flags, body] { return body(session, *flags); });
    });
    return command;
  };
  const auto changes = [&](CLI::App* command) {
    command->add_option("--layers", flags->layers, "a layer or a range: 3 or 2-5; default: all");
    command->add_option("--ops", flags->ops, "only these ops: fc1,fc2; default: all")
        ->delimiter(',');
    command->add_option("--reason", flags->reason, "kept in the job's events");
    command->add_option("--etag", flags->etag, "only if nobody changed the plan since");
    command->add_option("--request-id", flags->request_id, "repeat under this id");
  };
  CLI::App* automatic = add(
      "auto", "switch the policy of a job on or off; on --layers gives layers back to it", Auto);
  automatic->add_option("word", flags->word, "on or off")
      ->required()
      ->check(CLI::IsMember({"on", "off"}).description(""));
  automatic->add_option("job", flags->job, "name of the job")->required();
  changes(automatic);
  CLI::App* pin = add(
      "pin", "keep layers in their recipe, whatever the policy sees, until auto on --layers", Pin);
  pin->add_option("job", flags->job, "name of the job")->required();
  changes(pin);
  CLI::App* replay =
      add("replay", "what a policy would have decided on the stored telemetry", Replay);
  replay->add_option("job", flags->job, "name of the job")->required();
  replay->add_option("--policy", flags->policy_file,
                     "YAML with keys of precision.policy; default: the job's own");
}

}  // namespace octavo
