// octavo fp8: the worst quantised tensors of a job, each with the reason why it is worst.
#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/table.h"
#include "cli/output/text.h"
#include "cli/validators.h"

namespace octavo {
namespace {

struct Flags {
  std::string job;
  int limit = 10;
};

std::string Number(double value, const char* format) {
  char text[32];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

int Fp8(Session& session, const Flags& flags) {
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  v1::GetHealthRequest request;
  request.set_name(JobResource(flags.job));
  request.set_limit(flags.limit);
  const absl::StatusOr<v1::JobHealth> health = (*client)->Call(&JobStub::GetHealth, request);
  if (!health.ok()) {
    return session.Fail(health.status());
  }
  if (session.json()) {
    session.out() << ToJson(*health);
    return kExitOk;
  }
  session.out() << BareName(health->job()) << ", steps " << health->first_step() << " to "
                << health->last_step() << ", plan version " << health->plan_version() << ", "
                << health->tensors_total() << " quantised tensors\n";
  if (health->tensors().empty()) {
    session.out() << "no tensor runs in FP8 and none is measured\n";
    return kExitOk;
  }
  Table table({{"SEVERITY", Align::kRight},
               {"LAYER", Align::kRight},
               {"OP"},
               {"TENSOR"},
               {"RECIPE"},
               {"SQNR dB", Align::kRight},
               {"AMAX", Align::kRight},
               {"WHY", Align::kLeft, 200}});
  for (const v1::TensorRank& t : health->tensors()) {
    table.AddRow({Number(t.severity(), "%.2f"), std::to_string(t.layer()), t.op(), t.tensor(),
                  t.recipe() + (t.shadow() ? " (shadow)" : ""),
                  t.sqnr_db() > 0 ? Number(t.sqnr_db(), "%.1f") : "-", Number(t.amax(), "%.3g"),
                  t.reason()});
  }
  session.out() << table.Render()
                << "severity 1 is the policy's threshold; a shadow is measured beside bf16\n";
  return kExitOk;
}

}  // namespace

void AddFp8(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("fp8", "the worst FP8 tensors of a job, and why");
  command->add_option("job", flags->job, "name of the job")->required();
  command->add_option("--limit", flags->limit, "tensors to show")
      ->check(AtLeast(1))
      ->capture_default_str();
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Fp8(session, *flags); }); });
}

}  // namespace octavo
