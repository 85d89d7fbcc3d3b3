#include <algorithm>

#include "base/clock.h"
#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/live.h"
#include "cli/output/table.h"
#include "cli/output/text.h"
#include "proto/jobs/job_state.h"

namespace octavo {
namespace {

struct Flags {
  std::vector<std::string> states;
  std::string owner;
  std::string selector;
  std::int64_t limit = 1000;
  bool names = false;
};

std::string LossCell(const v1::JobProgress& progress) {
  return progress.step() > 0 ? LossText(progress.loss()) : "-";
}

std::string StepCell(const v1::JobProgress& progress) {
  return StrCat(progress.step(), "/", progress.total_steps());
}

// "fp8_flow 4/6, bf16 2/6" as ranks report; the spec's recipe before they have.
std::string RecipeCell(const v1::Job& job) {
  std::string text = job.progress().recipe_summary();
  if (text.empty()) {
    return job.spec().precision().recipe();
  }
  const std::string_view unit = " layers";
  if (const std::size_t at = text.find(unit); at != std::string::npos) {
    text.erase(at, unit.size());
  }
  return text;
}

void PrintTable(Session& session, const std::vector<v1::Job>& jobs) {
  Table table({{"JOB"},
               {"STATE"},
               {"PRIORITY", Align::kRight},
               {"RANKS", Align::kRight},
               {"STEP", Align::kRight},
               {"LOSS", Align::kRight},
               {"RECIPE"},
               {"AGE"},
               {"STATUS"}});
  const std::int64_t now = RealClock::Get().UnixMicros();
  for (const v1::Job& job : jobs) {
    std::string age = Ago(job.create_time(), now);
    age = age.substr(0, age.find(" ago"));
    table.AddRow({BareName(job.name()), v1::JobState_Name(job.state()),
                  std::to_string(job.spec().priority()),
                  std::to_string(job.spec().parallel().ranks()), StepCell(job.progress()),
                  LossCell(job.progress()), RecipeCell(job), age,
                  job.state() == v1::RUNNING ? "" : StatusText(job)});
  }
  session.out() << (jobs.empty() ? "no jobs\n" : table.Render());
}

int List(Session& session, const Flags& flags) {
  if (flags.names) {
    session.options.attempts_max = 1;  // for completion: no waiting
  }
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  v1::ListJobsRequest request;
  for (const std::string& state : flags.states) {
    request.add_states(static_cast<v1::JobState>(*ParseJobState(state)));
  }
  request.set_owner(flags.owner);
  request.set_label_selector(flags.selector);
  std::vector<v1::Job> jobs;
  do {
    request.set_page_size(static_cast<int>(
        std::min<std::int64_t>(flags.limit - static_cast<std::int64_t>(jobs.size()), 100)));
    absl::StatusOr<v1::ListJobsResponse> page = (*client)->Call(&JobStub::ListJobs, request);
    if (!page.ok()) {
      return session.Fail(page.status());
    }
    for (v1::Job& job : *page->mutable_jobs()) {
      jobs.push_back(std::move(job));
    }
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty() && static_cast<std::int64_t>(jobs.size()) < flags.limit);
  if (flags.names) {
    for (const v1::Job& job : jobs) {
      session.out() << BareName(job.name()) << "\n";
    }
  } else if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("jobs").BeginArray();
    for (const v1::Job& job : jobs) {
      json.Proto(job);
    }
    session.out() << json.EndArray().EndObject().Take() << "\n";
  } else {
    PrintTable(session, jobs);
    if (!request.page_token().empty()) {
      session.err() << "more than " << flags.limit << " jobs; --limit shows more\n";
    }
  }
  return kExitOk;
}

}  // namespace

void AddList(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("list", "list jobs");
  std::vector<std::string> states;
  for (JobState state : kJobStates) {
    states.emplace_back(Name(state));
  }
  command->add_option("--state", flags->states, "only these states")
      ->check(CLI::IsMember(states).description(""))
      ->delimiter(',');
  command->add_option("--owner", flags->owner, "only this owner's");
  command->add_option("-l,--selector", flags->selector, "only with these labels: key=value,…");
  command->add_option("--limit", flags->limit, "at most so many")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1000000}))
      ->capture_default_str();
  command->add_flag("--names", flags->names, "names alone, one a line");
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return List(session, *flags); }); });
}

}  // namespace octavo
