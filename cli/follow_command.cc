#include "cli/follow_command.h"

#include "base/str.h"
#include "cli/follow.h"
#include "cli/output/json.h"
#include "cli/output/live.h"
#include "cli/output/text.h"

namespace octavo {

int FollowToTheEnd(Session& session, const FollowCommandArgs& args) {
  const StopSignals* signals = session.BlockSignals();
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  LiveView view(
      session.json() ? session.err() : session.out(),
      {.is_terminal = session.is_terminal && !session.json(), .width = session.terminal_width});
  const bool as_lines = session.json() && args.stream_events;
  const absl::StatusOr<v1::Job> job = Follow(**client, {.job = args.job,
                                                        .resume_token = args.resume_token,
                                                        .give_up_seconds = args.give_up_seconds,
                                                        .signals = signals,
                                                        .on_event =
                                                            [&](const v1::JobEvent& event) {
                                                              if (as_lines) {
                                                                session.out() << ToJsonLine(event)
                                                                              << std::flush;
                                                              } else {
                                                                view.OnEvent(event);
                                                              }
                                                            },
                                                        .on_note =
                                                            [&](const std::string& text) {
                                                              if (as_lines) {
                                                                session.err() << text << std::endl;
                                                              } else {
                                                                view.Note(text);
                                                              }
                                                            }});
  view.Finish();
  if (!job.ok()) {
    return session.Fail(job.status());
  }
  if (!session.json()) {
    session.out() << "\n" << SummaryText(*job);
  } else if (!args.stream_events) {
    session.out() << ToJson(*job);
  }
  if (job->state() == v1::SUSPENDED) {
    session.err() << "the job is suspended; octavo resume " << BareName(job->name())
                  << " continues it\n";
  }
  return ExitCodeOf(job->state());
}

}  // namespace octavo
