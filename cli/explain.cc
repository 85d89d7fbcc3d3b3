// octavo explain: what happened to a job and why, in sentences, from its resource, plans and events.
#include <algorithm>
#include <map>

#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/text.h"

namespace octavo {
namespace {

struct Flags {
  std::string job;
};

std::string Sentence(std::string text) {
  if (!text.empty() && text.back() != '.') {
    text += '.';
  }
  return text;
}

std::string StateSentence(const v1::Job& job) {
  const v1::JobProgress& p = job.progress();
  std::string text = StrCat(BareName(job.name()), " is ", v1::JobState_Name(job.state()));
  if (p.step() > 0) {
    StrAppend(&text, " at step ", p.step(), " of ", p.total_steps(), ", loss ",
              LossText(p.first_loss()), " at first and ", LossText(p.loss()), " now");
  }
  if (!job.pending().sentence().empty()) {
    StrAppend(&text, "; it waits because ", job.pending().sentence());
  } else if (!job.message().empty()) {
    StrAppend(&text, ": ", job.message());
  }
  return Sentence(text);
}

std::vector<std::string> AttemptSentences(const v1::Job& job) {
  std::vector<std::string> sentences;
  for (const v1::Attempt& attempt : job.attempts()) {
    std::string text = StrCat("Attempt ", attempt.number());
    StrAppend(&text, attempt.loaded_checkpoint_step() > 0
                         ? StrCat(" continued from the checkpoint of step ",
                                  attempt.loaded_checkpoint_step())
                         : std::string(" began with fresh weights"),
              " and reached step ", attempt.last_step());
    if (!attempt.end_reason().empty()) {
      StrAppend(&text, "; it ended because ", attempt.end_reason());
    }
    sentences.push_back(Sentence(text));
  }
  return sentences;
}

std::vector<std::string> PlanSentences(std::vector<v1::PrecisionPlan> plans) {
  std::sort(plans.begin(), plans.end(),
            [](const auto& a, const auto& b) { return a.version() < b.version(); });
  std::vector<std::string> sentences;
  for (const v1::PrecisionPlan& plan : plans) {
    std::string who = "the job's specification";
    if (plan.author() == v1::PLAN_AUTHOR_OPERATOR) {
      who = StrCat("operator ", plan.author_name());
    } else if (plan.author() == v1::PLAN_AUTHOR_POLICY) {
      who = "the policy";
    }
    std::string text = StrCat("Plan version ", plan.version(), " comes from ", who);
    StrAppend(&text, plan.applied_step() > 0
                         ? StrCat(", all ranks run it from step ", plan.applied_step())
                         : std::string(", ranks have not applied it"));
    if (!plan.reason().empty()) {
      StrAppend(&text, ": ", plan.reason());
    }
    sentences.push_back(Sentence(text));
  }
  return sentences;
}

int Explain(Session& session, const Flags& flags) {
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  const std::string name = JobResource(flags.job);
  v1::GetJobRequest get;
  get.set_name(name);
  const absl::StatusOr<v1::Job> job = (*client)->Call(&JobStub::GetJob, get);
  if (!job.ok()) {
    return session.Fail(job.status());
  }
  std::vector<v1::PrecisionPlan> plans;
  v1::ListPlansRequest list;
  list.set_name(name);
  do {
    const absl::StatusOr<v1::ListPlansResponse> page = (*client)->Call(&JobStub::ListPlans, list);
    if (!page.ok()) {
      return session.Fail(page.status());
    }
    plans.insert(plans.end(), page->plans().begin(), page->plans().end());
    list.set_page_token(page->next_page_token());
  } while (!list.page_token().empty());

  std::vector<std::string> sentences = {StateSentence(*job)};
  const auto add = [&sentences](const std::vector<std::string>& more) {
    sentences.insert(sentences.end(), more.begin(), more.end());
  };
  add(AttemptSentences(*job));
  add(PlanSentences(plans));
  const v1::JobProgress& progress = job->progress();
  if (progress.retried_steps() + progress.skipped_steps() > 0) {
    sentences.push_back(StrCat(progress.retried_steps(),
                               " steps had non-finite values and were repeated in bf16; ",
                               progress.skipped_steps(), " were skipped."));
  }
  // Warnings and words to the policy; equal texts once, with their number.
  std::vector<std::string> order;
  std::map<std::string, int> counts;
  v1::ListEventsRequest events;
  events.set_name(name);
  do {
    const absl::StatusOr<v1::ListEventsResponse> page =
        (*client)->Call(&JobStub::ListEvents, events);
    if (!page.ok()) {
      return session.Fail(page.status());
    }
    for (const v1::JobEvent& event : page->events()) {
      if (event.kind() != "WARNING" && event.kind() != "POLICY") {
        continue;
      }
      std::string text = event.message();
      if (event.step() > 0) {
        text = StrCat("At step ", event.step(), ": ", text);
      }
      if (counts[text]++ == 0) {
        order.push_back(text);
      }
    }
    events.set_page_token(page->next_page_token());
  } while (!events.page_token().empty());
  for (const std::string& text : order) {
    sentences.push_back(
        Sentence(counts[text] > 1 ? StrCat(text, " (", counts[text], " times)") : text));
  }
  v1::GetPrecisionRequest ask;
  ask.set_name(name);
  const absl::StatusOr<v1::JobPrecision> precision = (*client)->Call(&JobStub::GetPrecision, ask);
  if (!precision.ok()) {
    return session.Fail(precision.status());
  }
  if (!precision->policy_enabled()) {
    sentences.push_back("The policy is off: nothing falls back or returns by itself.");
  }
  for (const v1::PolicySite& site : precision->sites()) {
    const std::string where = StrCat("Layer ", site.layer(), " ", site.op());
    if (site.status() == "operator") {
      sentences.push_back(StrCat(where, " is in an operator's hands; the policy leaves it alone."));
    } else if (site.status() == "pinned") {
      sentences.push_back(StrCat(where, " fell from ", site.original(), " ", site.relapses() + 1,
                                 " times, last because of ", site.cause(),
                                 ", and stays until an operator decides."));
    } else {
      sentences.push_back(StrCat(where, " fell from ", site.original(), " at step ",
                                 site.since_step(), " because of ", site.cause(),
                                 "; it returns after ", site.hold_steps(),
                                 " steps at the earliest, when its shadow statistics are good."));
    }
  }
  for (const auto& mismatch : precision->effective().mismatches()) {
    sentences.push_back(StrCat("Layer ", mismatch.layer(), " ", mismatch.op(), " was planned in ",
                               mismatch.planned(), " and ", mismatch.count(),
                               " of its products ran in ", mismatch.executed(), ": ",
                               Sentence(mismatch.reason())));
  }
  if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("sentences").BeginArray();
    for (const std::string& sentence : sentences) {
      json.String(sentence);
    }
    session.out() << json.EndArray().EndObject().Take() << "\n";
    return kExitOk;
  }
  for (const std::string& sentence : sentences) {
    session.out() << Printable(sentence) << "\n";
  }
  return kExitOk;
}

}  // namespace

void AddExplain(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("explain", "what happened to a job, and why");
  command->add_option("job", flags->job, "name of the job")->required();
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Explain(session, *flags); }); });
}

}  // namespace octavo
