// octavo profile JOB --steps N: where the time of a running job's next steps goes.
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>

#include "base/bounded_queue.h"
#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/table.h"
#include "cli/output/text.h"
#include "cli/validators.h"
#include "proto/limits.h"

namespace octavo {
namespace {

constexpr int kPollMs = 500;

struct Flags {
  std::string job;
  int steps = 5;
  std::string by = "op";
  int rank = -1;
  int limit = 25;
  double timeout_seconds = 600;
  std::string output;
  std::string request_id;
};

std::string Number(double value, const char* format) {
  char text[32];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

// False: interrupted.
bool Pause(const StopSignals* signals) {
  const SteadyTime deadline = DeadlineAfter(std::chrono::milliseconds(kPollMs));
  if (signals != nullptr) {
    return !signals->Wait(deadline).has_value();
  }
  std::mutex mu;
  std::unique_lock<std::mutex> lock(mu);
  std::condition_variable().wait_until(lock, deadline, [] { return false; });
  return true;
}

struct Sum {
  std::int64_t calls = 0;
  double seconds = 0, bytes = 0, flops = 0;
};

// What ran beside the step's own operations is a row of its own.
std::string OpOf(const v1::ProfileEntry& e) {
  return e.beside() ? StrCat(e.op(), " (beside)") : e.op();
}

std::string KeyOf(const v1::ProfileEntry& e, const std::string& by) {
  if (by == "layer") {
    return StrCat(e.layer().empty() ? "-" : e.layer(), "\n", e.phase().empty() ? "-" : e.phase());
  }
  if (by == "site") {
    return StrCat(e.site().empty() ? "-" : e.site(), "\n", e.phase().empty() ? "-" : e.phase(),
                  "\n", OpOf(e));
  }
  return OpOf(e);
}

std::vector<std::string> TitlesOf(const std::string& by) {
  return by == "layer"  ? std::vector<std::string>{"LAYER", "PHASE"}
         : by == "site" ? std::vector<std::string>{"SITE", "PHASE", "OP"}
                        : std::vector<std::string>{"OP"};
}

// The rank that the others wait for in each step does the most itself.
const v1::RankProfile& Busiest(const v1::JobProfile& profile) {
  const auto busy = [](const v1::RankProfile& rank) {
    double seconds = 0;
    for (const v1::ProfileEntry& entry : rank.entries()) {
      const bool waits = entry.op().substr(0, 4) == "all_" || entry.op() == "wait_for_messages";
      seconds += waits || entry.beside() ? 0 : entry.seconds();
    }
    return seconds;
  };
  return *std::max_element(
      profile.ranks().begin(), profile.ranks().end(),
      [&](const v1::RankProfile& a, const v1::RankProfile& b) { return busy(a) < busy(b); });
}

std::string TimeTable(const v1::RankProfile& rank, const Flags& flags) {
  std::map<std::string, Sum> sums;
  double total = 0;
  for (const v1::ProfileEntry& entry : rank.entries()) {
    if (entry.beside() && flags.by == "layer") {
      continue;  // no part of a layer's time
    }
    Sum& sum = sums[KeyOf(entry, flags.by)];
    sum.calls += entry.calls();
    sum.seconds += entry.seconds();
    sum.bytes += entry.bytes();
    sum.flops += entry.flops();
    total += entry.beside() ? 0 : entry.seconds();
  }
  std::vector<std::pair<std::string, Sum>> rows(sums.begin(), sums.end());
  std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
    return a.second.seconds > b.second.seconds;
  });
  std::vector<Column> columns;
  for (const std::string& title : TitlesOf(flags.by)) {
    columns.push_back({title});
  }
  for (const char* title : {"CALLS/STEP", "MS/STEP", "SHARE", "GB/s", "TFLOP/s"}) {
    columns.push_back({title, Align::kRight});
  }
  Table table(columns);
  const double steps = std::max(1, rank.steps());
  const auto add = [&](std::vector<std::string> cells, const Sum& sum) {
    const double share = rank.seconds() > 0 ? sum.seconds / rank.seconds() : 0;
    cells.push_back(Number(static_cast<double>(sum.calls) / steps, "%.0f"));
    cells.push_back(Number(1e3 * sum.seconds / steps, "%.3f"));
    cells.push_back(PercentText(share));
    const bool timed = sum.seconds > 0;
    cells.push_back(timed && sum.bytes > 0 ? Number(sum.bytes / sum.seconds / 1e9, "%.1f") : "-");
    cells.push_back(timed && sum.flops > 0 ? Number(sum.flops / sum.seconds / 1e12, "%.3g") : "-");
    table.AddRow(std::move(cells));
  };
  const auto keys = TitlesOf(flags.by).size();
  Sum rest;
  std::int64_t left = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (static_cast<int>(i) < flags.limit) {
      add(StrSplit(rows[i].first, '\n'), rows[i].second);
    } else {
      ++left;
      rest.calls += rows[i].second.calls;
      rest.seconds += rows[i].second.seconds;
    }
  }
  const auto label = [&](const std::string& text) {
    std::vector<std::string> cells(keys);
    cells[0] = text;
    return cells;
  };
  if (left > 0) {
    add(label(StrCat("(", left, " more)")), rest);
  }
  // The compute stream's pauses: the host prepares, waits for other ranks, or reads data.
  add(label("(between operations)"), {.seconds = std::max(0.0, rank.seconds() - total)});
  return table.Render();
}

// Products that did not run as the plan asks.
std::string Fallbacks(const v1::JobProfile& profile) {
  std::map<std::string, std::pair<std::int64_t, double>> fallen;
  double flops = 0;
  for (const v1::RankProfile& rank : profile.ranks()) {
    for (const v1::ProfilePrecision& p : rank.precision()) {
      flops += p.flops();
      if (p.planned() != p.executed()) {
        auto& [calls, fallen_flops] = fallen[StrCat(p.layer(), "\n", p.op(), "\n", p.planned(),
                                                    "\n", p.executed(), "\n", p.reason())];
        calls += p.calls();
        fallen_flops += p.flops();
      }
    }
  }
  if (fallen.empty()) {
    return "every product ran in the precision that the plan asks for\n";
  }
  Table table({{"LAYER", Align::kRight},
               {"OP"},
               {"PLANNED"},
               {"RAN AS"},
               {"WHY"},
               {"CALLS", Align::kRight},
               {"OF FLOPS", Align::kRight}});
  for (const auto& [key, count] : fallen) {
    std::vector<std::string> cells = StrSplit(key, '\n');
    cells.push_back(std::to_string(count.first));
    cells.push_back(PercentText(flops > 0 ? count.second / flops : 0));
    table.AddRow(std::move(cells));
  }
  return StrCat("products that ran in another precision than planned:\n", table.Render());
}

int Show(Session& session, const Flags& flags, const v1::JobProfile& profile) {
  const v1::RankProfile* rank = &Busiest(profile);
  for (const v1::RankProfile& candidate : profile.ranks()) {
    rank = candidate.rank() == flags.rank ? &candidate : rank;
  }
  if (!rank->error().empty()) {
    return session.Fail(
        InternalError(StrCat("rank ", rank->rank(), " measured nothing: ", rank->error())));
  }
  const double steps = std::max(1, rank->steps());
  session.out() << BareName(profile.job()) << ", attempt " << profile.attempt() << ", rank "
                << rank->rank() << (flags.rank < 0 && profile.ranks_size() > 1 ? " (busiest)" : "")
                << " on " << rank->backend() << ", steps " << rank->first_step() << " to "
                << rank->first_step() + rank->steps() - 1 << ", "
                << Number(1e3 * rank->seconds() / steps, "%.1f") << " ms a step\n"
                << TimeTable(*rank, flags) << Fallbacks(profile);
  if (rank->untimed_calls() > 0) {
    session.out() << rank->untimed_calls() << " calls were beyond what a step can time\n";
  }
  return kExitOk;
}

absl::StatusOr<v1::JobProfile> Await(Client& client, const Flags& flags,
                                     const v1::JobProfile& asked, const StopSignals* signals) {
  v1::GetProfileRequest request;
  request.set_name(asked.job());
  request.set_id(asked.id());
  const SteadyTime deadline = DeadlineAfter(
      std::chrono::milliseconds(static_cast<std::int64_t>(1e3 * flags.timeout_seconds)));
  for (;;) {
    ASSIGN_OR_RETURN(v1::JobProfile profile, client.Call(&JobStub::GetProfile, request));
    if (profile.complete()) {
      return profile;
    }
    if (profile.over()) {
      return AbortedError(StrCat("attempt ", profile.attempt(), " ended after ",
                                 profile.ranks_size(), " of ", profile.ranks_expected(),
                                 " ranks had answered; profile the next one"));
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      return DeadlineExceededError(StrCat(profile.ranks_size(), " of ", profile.ranks_expected(),
                                          " ranks answered within ",
                                          Number(flags.timeout_seconds, "%g"),
                                          " s; steps may be slow: --timeout, or fewer --steps"));
    }
    if (!Pause(signals)) {
      return CancelledError("interrupted");
    }
  }
}

int Profile(Session& session, const Flags& flags) {
  const StopSignals* signals = session.BlockSignals();
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  if (flags.rank >= 0) {  // asked before, because a profile replaces another one
    v1::GetJobRequest get;
    get.set_name(JobResource(flags.job));
    const absl::StatusOr<v1::Job> job = (*client)->Call(&JobStub::GetJob, get);
    if (!job.ok()) {
      return session.Fail(job.status());
    }
    if (const std::int32_t ranks = job->spec().parallel().ranks(); flags.rank >= ranks) {
      return session.Fail(InvalidArgumentError(
          StrCat("--rank ", flags.rank, " does not exist; valid: 0 to ", ranks - 1)));
    }
  }
  v1::ProfileJobRequest request;
  request.set_name(JobResource(flags.job));
  request.set_steps(flags.steps);
  request.set_request_id(flags.request_id.empty() ? NewRequestId() : flags.request_id);
  const absl::StatusOr<v1::JobProfile> asked = (*client)->Call(&JobStub::ProfileJob, request);
  if (!asked.ok()) {
    return session.Fail(asked.status());
  }
  const absl::StatusOr<v1::JobProfile> profile = Await(**client, flags, *asked, signals);
  if (!profile.ok()) {
    return profile.status().code() == absl::StatusCode::kCancelled ? kExitInterrupted
                                                                   : session.Fail(profile.status());
  }
  if (!flags.output.empty()) {
    const absl::Status written =
        PosixFileSystem::Get().WriteFileAtomic(flags.output, ToJson(*profile));
    if (!written.ok()) {
      return session.Fail(Annotate(written, "--output"));
    }
  }
  if (session.json()) {
    session.out() << ToJson(*profile);
    return kExitOk;
  }
  return Show(session, flags, *profile);
}

}  // namespace

void AddProfile(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("profile", "time of a running job's next steps, by operation and layer");
  command->add_option("job", flags->job, "name of the job")->required();
  command->add_option("--steps", flags->steps, "steps to time")
      ->check(CLI::Range(1, kProfileStepsMax))
      ->capture_default_str();
  command->add_option("--by", flags->by, "op, layer or site (the product that a call belongs to)")
      ->check(CLI::IsMember({"op", "layer", "site"}))
      ->capture_default_str();
  command->add_option("--rank", flags->rank, "show this rank; default: the busiest one")
      ->check(AtLeast(0));
  command->add_option("--limit", flags->limit, "rows to show")
      ->check(AtLeast(1))
      ->capture_default_str();
  command->add_option("--output", flags->output, "write everything to this file as JSON");
  command->add_option("--timeout", flags->timeout_seconds, "seconds to wait for the steps")
      ->check(FiniteRange(1, 86400))
      ->capture_default_str();
  command->add_option("--request-id", flags->request_id, "repeat under this id");
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Profile(session, *flags); }); });
}

}  // namespace octavo
