// octavo precision show|set|history|diff|rollback: the plan as a resource with history. The
// policy's part (auto, pin, replay) is in precision_policy.cc.
#include "proto/convert/precision.h"

#include <algorithm>
#include <set>

#include "base/status.h"
#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/table.h"
#include "cli/output/text.h"
#include "cli/precision_parts.h"
#include "cli/validators.h"
#include "proto/spec/field_walker.h"

namespace octavo {
namespace {

struct Flags {
  std::string job;
  std::string layers;
  std::vector<std::string> ops;
  std::string recipe;
  std::vector<std::string> parameters;
  std::string reason;
  std::string etag;
  std::string request_id;
  bool dry_run = false;
  std::int64_t version = 0, other_version = 0;
};

const char* AuthorText(v1::PlanAuthor author) {
  switch (author) {
    case v1::PLAN_AUTHOR_OPERATOR:
      return "operator";
    case v1::PLAN_AUTHOR_POLICY:
      return "policy";
    default:
      return "spec";
  }
}

std::string RecipeText(const v1::Recipe& wire) {
  const absl::StatusOr<Recipe> recipe = RecipeFromWire(wire);
  return recipe.ok() ? DebugString(*recipe) : wire.kind();
}

int Show(Session& session, const Flags& flags) {
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  v1::GetPrecisionRequest request;
  request.set_name(JobResource(flags.job));
  const absl::StatusOr<v1::JobPrecision> precision =
      (*client)->Call(&JobStub::GetPrecision, request);
  if (!precision.ok()) {
    return session.Fail(precision.status());
  }
  if (session.json()) {
    session.out() << ToJson(*precision);
    return kExitOk;
  }
  const absl::StatusOr<PrecisionPlan> plan = PlanFromWire(precision->plan());
  if (!plan.ok()) {
    return session.Fail(plan.status());
  }
  KeyValues lines;
  lines.Add("job", BareName(precision->job()));
  lines.Add("plan version", StrCat(plan->version, " by ", AuthorText(precision->plan().author())));
  lines.Add("reason", plan->reason);
  lines.Add("ranks run version", std::to_string(precision->effective().plan_version()));
  lines.Add("policy", precision->policy_enabled() ? "on" : "off");
  lines.Add("etag", precision->etag());
  session.out() << lines.Render() << "\nplanned\n" << Printable(DebugString(*plan), true);
  if (!precision->effective().entries().empty()) {
    v1::PrecisionPlan effective;
    effective.set_version(precision->effective().plan_version());
    effective.set_layers(plan->layers);
    *effective.mutable_entries() = precision->effective().entries();
    const absl::StatusOr<PrecisionPlan> in_force = PlanFromWire(effective);
    session.out() << "\nin force, as ranks report (step " << precision->effective().step() << ")\n"
                  << (in_force.ok() ? Printable(DebugString(*in_force), true)
                                    : Printable(Message(in_force.status())) + "\n");
  }
  if (precision->sites_size() > 0) {
    session.out() << "\nfallen, pinned or an operator's\n" << PolicySitesText(*precision);
  }
  Table table({{"LAYER", Align::kRight},
               {"OP"},
               {"PLANNED"},
               {"EXECUTED"},
               {"COUNT", Align::kRight},
               {"WHY"}});
  for (const auto& mismatch : precision->effective().mismatches()) {
    table.AddRow({std::to_string(mismatch.layer()), mismatch.op(), mismatch.planned(),
                  mismatch.executed(), std::to_string(mismatch.count()), mismatch.reason()});
  }
  if (!table.empty()) {
    session.out() << "\nexecuted otherwise than planned\n" << table.Render();
  }
  return kExitOk;
}

// Newest first; all pages.
absl::StatusOr<std::vector<v1::PrecisionPlan>> Plans(Client& client, const std::string& job) {
  v1::ListPlansRequest request;
  request.set_name(JobResource(job));
  std::vector<v1::PrecisionPlan> plans;
  do {
    ASSIGN_OR_RETURN(v1::ListPlansResponse page, client.Call(&JobStub::ListPlans, request));
    for (v1::PrecisionPlan& plan : *page.mutable_plans()) {
      plans.push_back(std::move(plan));
    }
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  return plans;
}

int History(Session& session, const Flags& flags) {
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  const auto plans = Plans(**client, flags.job);
  if (!plans.ok()) {
    return session.Fail(plans.status());
  }
  if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("plans").BeginArray();
    for (const v1::PrecisionPlan& plan : *plans) {
      json.Proto(plan);
    }
    session.out() << json.EndArray().EndObject().Take() << "\n";
    return kExitOk;
  }
  Table table({{"VERSION", Align::kRight},
               {"AUTHOR"},
               {"CREATED"},
               {"APPLIED AT STEP", Align::kRight},
               {"REASON"}});
  for (const v1::PrecisionPlan& plan : *plans) {
    std::string author = AuthorText(plan.author());
    if (!plan.author_name().empty()) {
      StrAppend(&author, " ", plan.author_name());
    }
    table.AddRow({std::to_string(plan.version()), author, Rfc3339(plan.create_time()),
                  plan.applied_step() > 0 ? std::to_string(plan.applied_step()) : "-",
                  plan.reason()});
  }
  session.out() << table.Render();
  return kExitOk;
}

absl::StatusOr<PrecisionPlan> FindPlan(const std::vector<v1::PrecisionPlan>& plans,
                                       std::int64_t version) {
  for (const v1::PrecisionPlan& plan : plans) {
    if (plan.version() == version) {
      return PlanFromWire(plan);
    }
  }
  return NotFoundError(
      StrCat("the job has no plan version ", version, "; octavo precision history lists them"));
}

int DiffPlans(Session& session, const Flags& flags) {
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  const auto plans = Plans(**client, flags.job);
  if (!plans.ok()) {
    return session.Fail(plans.status());
  }
  const absl::StatusOr<PrecisionPlan> before = FindPlan(*plans, flags.version);
  const absl::StatusOr<PrecisionPlan> after = FindPlan(*plans, flags.other_version);
  if (!before.ok() || !after.ok()) {
    return session.Fail(before.ok() ? after.status() : before.status());
  }
  const std::vector<PlanChange> changes = Diff(*before, *after);
  if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("changes").BeginArray();
    for (const PlanChange& change : changes) {
      json.BeginObject().Key("layer").Int(change.site.layer).Key("op").String(Name(change.site.op));
      json.Key("before").String(DebugString(change.before));
      json.Key("after").String(DebugString(change.after)).EndObject();
    }
    session.out() << json.EndArray().EndObject().Take() << "\n";
    return kExitOk;
  }
  Table table({{"LAYER", Align::kRight}, {"OP"}, {"BEFORE"}, {"AFTER"}});
  for (const PlanChange& change : changes) {
    table.AddRow({std::to_string(change.site.layer), std::string(Name(change.site.op)),
                  DebugString(change.before), DebugString(change.after)});
  }
  session.out() << (changes.empty() ? "no difference\n" : table.Render());
  return kExitOk;
}

// "history_len=16" into a recipe, by the field's own rules. Checked here whatever the value: on the
// wire a parameter that is 0 is one that was not given.
absl::Status SetParameter(const std::string& text, v1::Recipe* recipe) {
  const std::size_t equals = text.find('=');
  const std::string key = text.substr(0, equals);
  const std::vector<std::string> names =
      RecipeParameters(*ParseRecipeKind(recipe->kind()));  // the flag takes known names only
  if (equals == std::string::npos || std::find(names.begin(), names.end(), key) == names.end()) {
    return InvalidArgumentError(
        names.empty() ? StrCat("--param ", Quoted(text), ": recipe ", recipe->kind(),
                               " has no parameters; leave it out")
                      : StrCat("--param ", Quoted(text), "; valid for recipe ", recipe->kind(),
                               ": NAME=VALUE with ", StrJoin(names, ", "), Suggestion(key, names)));
  }
  const auto* field = v1::Recipe::descriptor()->FindFieldByName(key);
  v1::Recipe alone;
  alone.set_kind(recipe->kind());
  SpecFindings findings;
  findings.Locate(key, {});  // given: zero is checked like every other value
  const bool readable = SetScalar(*field, text.substr(equals + 1), false, &alone);
  CheckRules(alone, findings);
  if (!readable || !findings.violations().empty()) {
    return InvalidArgumentError(StrCat("--param ", Quoted(text), "; valid: ", ValidText(*field)));
  }
  recipe->MergeFrom(alone);
  return absl::OkStatus();
}

// What was changed is the operator's; how to give it back. Empty when nothing changed.
std::string GiveBackText(const std::string& job, const v1::SetPrecisionResponse& response) {
  std::set<std::int32_t> layers;
  for (const v1::LayerOpRecipe& change : response.changed()) {
    layers.insert(change.layer());
  }
  std::string text;
  for (auto at = layers.begin(); at != layers.end();) {
    const std::int32_t first = *at;
    std::int32_t last = first;
    while (++at != layers.end() && *at == last + 1) {
      last = *at;
    }
    StrAppend(&text, text.empty() ? "" : ", also --layers ", first,
              last == first ? std::string() : StrCat("-", last));
  }
  return text.empty() ? text
                      : StrCat(
                            "the policy leaves these ops alone now; back to the policy: octavo "
                            "precision auto on ",
                            BareName(job), " --layers ", text, "\n");
}

int Send(Session& session, v1::SetPrecisionRequest request, const Flags& flags) {
  request.set_name(JobResource(flags.job));
  request.set_request_id(flags.request_id.empty() ? NewRequestId() : flags.request_id);
  request.set_etag(flags.etag);
  request.set_reason(flags.reason);
  request.set_validate_only(flags.dry_run);
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  const absl::StatusOr<v1::SetPrecisionResponse> response =
      (*client)->Call(&JobStub::SetPrecision, request);
  if (!response.ok()) {
    return session.Fail(response.status());
  }
  if (session.json()) {
    session.out() << ToJson(*response);
    return kExitOk;
  }
  if (flags.dry_run) {
    session.out() << "valid; it would be plan version " << response->plan().version() << "\n";
  } else {
    session.out() << "plan version " << response->plan().version()
                  << "; ranks apply it at their next step\n";
  }
  Table table({{"LAYER", Align::kRight}, {"OP"}, {"RECIPE"}});
  for (const v1::LayerOpRecipe& change : response->changed()) {
    table.AddRow({std::to_string(change.layer()), change.op(), RecipeText(change.recipe())});
  }
  session.out() << (table.empty() ? "nothing changes\n" : table.Render());
  for (const std::string& warning : response->warnings()) {
    session.out() << "warning: " << Printable(warning) << "\n";
  }
  if (!flags.dry_run) {
    session.out() << GiveBackText(flags.job, *response);
  }
  if (response->has_replay()) {
    session.out() << "\nthe policy on the stored telemetry under this plan\n"
                  << ReplayText(response->replay());
  } else if (flags.dry_run) {
    session.out() << "\nno telemetry is stored yet, so nothing could be replayed\n";
  }
  return kExitOk;
}

int Set(Session& session, const Flags& flags) {
  v1::SetPrecisionRequest request;
  v1::PrecisionOverride* change = request.add_overrides();
  change->set_layers(flags.layers);
  for (const std::string& op : flags.ops) {
    change->add_ops(op);
  }
  change->mutable_recipe()->set_kind(flags.recipe);
  for (const std::string& parameter : flags.parameters) {
    const absl::Status status = SetParameter(parameter, change->mutable_recipe());
    if (!status.ok()) {
      return session.Fail(status);
    }
  }
  return Send(session, request, flags);
}

int Rollback(Session& session, const Flags& flags) {
  v1::SetPrecisionRequest request;
  request.set_rollback_to(flags.version);
  return Send(session, request, flags);
}

using Body = int (*)(Session&, const Flags&);

CLI::App* AddPart(CLI::App& group, Session& session, const std::shared_ptr<Flags>& flags,
                  const char* name, const char* help, Body body) {
  CLI::App* command = group.add_subcommand(name, help);
  command->add_option("job", flags->job, "name of the job")->required();
  command->callback([&session, flags, body] {
    session.Run([&session, flags, body] { return body(session, *flags); });
  });
  return command;
}

void AddChangeFlags(CLI::App* command, const std::shared_ptr<Flags>& flags) {
  command->add_option("--reason", flags->reason, "kept in the plan's history");
  command->add_option("--etag", flags->etag, "only if nobody changed the plan since");
  command->add_option("--request-id", flags->request_id, "repeat under this id");
  command->add_flag("--dry-run", flags->dry_run, "check and show what would change");
}

}  // namespace

void AddPrecision(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* group = app.add_subcommand("precision", "the precision plan of a job");
  group->require_subcommand(1);
  AddPart(*group, session, flags, "show", "plan, and what ranks really run", Show);
  CLI::App* set = AddPart(*group, session, flags, "set", "another recipe for some layers", Set);
  set->add_option("--layers", flags->layers, "a layer or a range: 3 or 2-5")->required();
  set->add_option("--ops", flags->ops, "only these ops: fc1,fc2; default: all")->delimiter(',');
  set->add_option("--recipe", flags->recipe, "name of the recipe")
      ->required()
      ->check(CLI::IsMember(RecipeKindNames()).description(""));
  set->add_option("--param", flags->parameters, "parameter of the recipe, e.g. history_len=16");
  AddChangeFlags(set, flags);
  AddPart(*group, session, flags, "history", "all versions of the plan, with reasons", History);
  CLI::App* diff =
      AddPart(*group, session, flags, "diff", "what two versions differ in", DiffPlans);
  diff->add_option("before", flags->version, "version")->required();
  diff->add_option("after", flags->other_version, "version")->required();
  CLI::App* rollback =
      AddPart(*group, session, flags, "rollback", "go back to an older version", Rollback);
  rollback->add_option("--to", flags->version, "version to go back to")
      ->required()
      ->check(AtLeast(1));
  AddChangeFlags(rollback, flags);
  AddPrecisionPolicy(*group, session);
}

}  // namespace octavo
