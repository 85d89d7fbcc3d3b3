// Completion scripts written from the program's own commands and flags, so they cannot fall behind.
#include <algorithm>

#include "base/str.h"
#include "cli/commands.h"

namespace octavo {
namespace {

// One command with everything that may follow it.
struct Place {
  std::string path;  // "octavo precision set"
  std::vector<std::string> commands, flags;
  std::string operand;  // "job", "worker", "file", … of the first positional
};

bool Has(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

void Collect(const CLI::App& app, const std::string& path,
             const std::vector<std::string>& global_flags, std::vector<Place>* places) {
  Place place;
  place.path = path;
  place.flags = global_flags;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      if (!Has(place.flags, "--" + name)) {
        place.flags.push_back("--" + name);
      }
    }
    if (option->get_lnames().empty() && place.operand.empty()) {
      place.operand = option->get_name(true);
    }
  }
  const auto subcommands = app.get_subcommands([](const CLI::App*) { return true; });
  for (const CLI::App* command : subcommands) {
    place.commands.push_back(command->get_name());
  }
  places->push_back(place);
  for (const CLI::App* command : subcommands) {
    Collect(*command, path + " " + command->get_name(), global_flags, places);
  }
}

std::vector<Place> Places(const CLI::App& app) {
  std::vector<std::string> global_flags;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      global_flags.push_back("--" + name);
    }
  }
  std::vector<Place> places;
  Collect(app, "octavo", global_flags, &places);
  return places;
}

bool TakesFile(const Place& place) {
  return place.operand == "file" || place.operand == "path" || place.operand == "inputs";
}

// The lines of `case "$path" in …`: the same in bash and zsh.
std::string PathCases(const std::vector<Place>& places) {
  std::string out;
  for (const Place& place : places) {
    if (place.path.find(' ') != std::string::npos) {
      StrAppend(&out, out.empty() ? "" : "|", "\"", place.path, "\"");
    }
  }
  return out;
}

std::string WordCases(const std::vector<Place>& places) {
  std::string out;
  for (const Place& place : places) {
    std::vector<std::string> words = place.commands;
    words.insert(words.end(), place.flags.begin(), place.flags.end());
    StrAppend(&out, "    \"", place.path, "\") words=\"", StrJoin(words, " "), "\"");
    if (place.operand == "job") {
      out += "; jobs=1";
    } else if (TakesFile(place)) {
      out += "; files=1";
    }
    out += " ;;\n";
  }
  return out;
}

std::string Bash(const std::vector<Place>& places) {
  return StrCat(R"sh(# octavo completion for bash: source <(octavo completion bash)
_octavo() {
  local cur="${COMP_WORDS[COMP_CWORD]}" path=octavo words= jobs= files= word
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "$path $word" in
      )sh",
                PathCases(places), R"sh() path="$path $word" ;;
    esac
  done
  case "$path" in
)sh",
                WordCases(places), R"sh(  esac
  if [ -n "$jobs" ] && [ "${cur#-}" = "$cur" ]; then
    words="$words $(octavo list --names --timeout 1 2>/dev/null)"
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  if [ -n "$files" ] && [ "${cur#-}" = "$cur" ]; then
    COMPREPLY+=($(compgen -f -- "$cur"))
  fi
}
complete -o filenames -F _octavo octavo
)sh");
}

// zsh: `words` and `path` are special there, so the script has names of its own.
std::string Zsh(const std::vector<Place>& places) {
  std::string cases;
  for (const Place& place : places) {
    std::vector<std::string> words = place.commands;
    words.insert(words.end(), place.flags.begin(), place.flags.end());
    StrAppend(&cases, "    '", place.path, "') offers=(", StrJoin(words, " "), ")");
    if (place.operand == "job") {
      cases += "; jobs=1";
    } else if (TakesFile(place)) {
      cases += "; files=1";
    }
    cases += " ;;\n";
  }
  return StrCat(R"sh(#compdef octavo
# octavo completion for zsh: put this into a folder of $fpath as _octavo
_octavo() {
  local place=octavo jobs= files= word
  local -a offers
  for word in "${(@)words[2,CURRENT-1]}"; do
    case "$place $word" in
      ()sh",
                PathCases(places), R"sh() place="$place $word" ;;
    esac
  done
  case "$place" in
)sh",
                cases, R"sh(  esac
  if [[ -n $jobs ]]; then
    offers+=(${(f)"$(octavo list --names --timeout 1 2>/dev/null)"})
  fi
  compadd -- $offers
  if [[ -n $files ]]; then _files; fi
}
if
  [[$funcstack [1] == _octavo]];
then _octavo "$@";
else compdef _octavo octavo; fi
)sh");
}

std::string Fish(const std::vector<Place>& places) {
  std::string out = "# octavo completion for fish: octavo completion fish | source\n";
  for (const Place& place : places) {
    const std::vector<std::string> parts = StrSplit(place.path, ' ');
    std::string condition = parts.size() == 1 ? "__fish_use_subcommand" : std::string();
    for (std::size_t i = 1; i < parts.size(); ++i) {
      StrAppend(&condition, i > 1 ? "; and " : "", "__fish_seen_subcommand_from ", parts[i]);
    }
    const std::string head = StrCat("complete -c octavo -n '", condition, "' ");
    if (!place.commands.empty()) {
      StrAppend(&out, head, "-f -a '", StrJoin(place.commands, " "), "'\n");
    }
    for (const std::string& flag : place.flags) {
      StrAppend(&out, head, "-l ", flag.substr(2), "\n");
    }
    if (place.operand == "job") {
      StrAppend(&out, head, "-f -a '(octavo list --names --timeout 1 2>/dev/null)'\n");
    }
  }
  return out;
}

}  // namespace

void AddCompletion(CLI::App& app, Session& session) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("completion", "print a completion script for a shell");
  command->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}).description(""));
  command->callback([&app, &session, shell] {
    session.Run([&app, &session, shell] {
      const std::vector<Place> places = Places(app);
      session.out() << (*shell == "bash"  ? Bash(places)
                        : *shell == "zsh" ? Zsh(places)
                                          : Fish(places));
      return int{kExitOk};
    });
  });
}

}  // namespace octavo
