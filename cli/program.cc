#include "cli/program.h"

#include <unistd.h>

#include <climits>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "base/subprocess.h"

namespace octavo {
namespace {

std::string BesideThisProgram(const std::string& name) {
  char self[PATH_MAX];
  const ssize_t length = ::readlink("/proc/self/exe", self, sizeof(self));
  return length <= 0 ? name
                     : JoinPath(DirectoryName({self, static_cast<std::size_t>(length)}), name);
}

}  // namespace

int RunProgram(Session& session, const std::string& name, std::vector<std::string> arguments) {
  session.out().flush();
  session.err().flush();
  const std::string program = BesideThisProgram(name);
  arguments.insert(arguments.begin(), program);
  const auto child = Subprocess::Spawn({.argv = std::move(arguments), .new_process_group = false});
  if (!child.ok()) {
    return session.Fail(Annotate(child.status(), StrCat("starting ", program)));
  }
  // It works for as long as its work takes; a person can end both.
  const std::optional<ExitReason> exit = (*child)->Wait(SteadyTime::max());
  if (!exit.has_value() || exit->signal != 0) {
    return session.Fail(InternalError(StrCat(
        program, " ended by ", exit.has_value() ? exit->DebugString() : "an unknown cause")));
  }
  return exit->code;
}

}  // namespace octavo
