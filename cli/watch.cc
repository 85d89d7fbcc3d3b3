#include "cli/commands.h"
#include "cli/follow_command.h"
#include "cli/output/text.h"
#include "cli/validators.h"

namespace octavo {
namespace {

struct Flags {
  std::string job;
  std::int64_t from = 0;
  double give_up_seconds = 300;
};

}  // namespace

void AddWatch(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("watch", "follow a job to its end; the exit status is that of the job");
  command->add_option("job", flags->job, "name of the job")->required();
  command->add_option("--from", flags->from, "revision to continue after; default: from now")
      ->check(AtLeast(0));
  command
      ->add_option("--give-up", flags->give_up_seconds,
                   "seconds without the controller after which following ends")
      ->check(FiniteRange(0, 1e9))
      ->capture_default_str();
  command->callback([&session, flags] {
    session.Run([&session, flags] {
      return FollowToTheEnd(session, {.job = JobResource(flags->job),
                                      .resume_token = flags->from,
                                      .give_up_seconds = flags->give_up_seconds,
                                      .stream_events = true});
    });
  });
}

}  // namespace octavo
