#include "cli/output/text.h"

#include <cmath>
#include <cstdio>
#include <ctime>

#include "base/clock.h"
#include "base/str.h"
#include "proto/spec/yaml_source.h"

namespace octavo {
namespace {

// Length of the valid UTF-8 character at the beginning, 0 when there is none.
std::size_t CharacterBytes(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text.front());
  const std::size_t length = lead < 0x80 ? 1 : lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (text.size() < length || (lead != 0 && !IsValidUtf8(text.substr(0, length)))) {
    return 0;
  }
  return length;
}

std::string Resource(std::string_view prefix, std::string_view name) {
  return StartsWith(name, prefix) ? std::string(name) : StrCat(prefix, name);
}

}  // namespace

std::string Rfc3339(const google::protobuf::Timestamp& time) {
  if (time.seconds() == 0 && time.nanos() == 0) {
    return {};
  }
  const std::time_t seconds = time.seconds();
  std::tm utc{};
  if (gmtime_r(&seconds, &utc) == nullptr) {
    return {};
  }
  char date[40];
  std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &utc);
  char text[60];
  std::snprintf(text, sizeof(text), "%s.%03dZ", date, time.nanos() / 1000000);
  return text;
}

std::string Ago(const google::protobuf::Timestamp& time, std::int64_t now_unix_micros) {
  if (time.seconds() == 0) {
    return "-";
  }
  const double seconds =
      static_cast<double>(now_unix_micros) / kMicrosPerSecond - static_cast<double>(time.seconds());
  return seconds < 1 ? "now" : HumanDuration(std::floor(seconds)) + " ago";
}

std::string HexHash(std::uint64_t hash) {
  char text[24];
  std::snprintf(text, sizeof(text), "0x%016llx", static_cast<unsigned long long>(hash));
  return text;
}

std::string BareName(std::string_view resource) {
  const std::size_t slash = resource.find('/');
  return std::string(slash == std::string_view::npos ? resource : resource.substr(slash + 1));
}
std::string JobResource(std::string_view name) { return Resource("jobs/", name); }
std::string WorkerResource(std::string_view name) { return Resource("workers/", name); }

std::string ValidUtf8(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t length = CharacterBytes(text);
    if (length == 0) {
      out += "\xEF\xBF\xBD";
      text.remove_prefix(1);
    } else {
      out += text.substr(0, length);
      text.remove_prefix(length);
    }
  }
  return out;
}

std::string Printable(std::string_view text, bool keep_newlines) {
  std::string out = ValidUtf8(text);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto byte = static_cast<unsigned char>(out[i]);
    const bool kept = keep_newlines && (out[i] == '\n' || out[i] == '\t');
    if ((byte < 0x20 && !kept) || byte == 0x7F) {
      out[i] = out[i] == '\n' || out[i] == '\t' ? ' ' : '?';
    } else if (byte == 0xC2 && i + 1 < out.size() &&
               static_cast<unsigned char>(out[i + 1]) < 0xA0) {
      out.replace(i, 2, "?");  // U+0080…U+009F: 8-bit control codes
    }
  }
  return out;
}

int DisplayWidth(std::string_view text) {
  int width = 0;
  for (char c : text) {
    width += (static_cast<unsigned char>(c) & 0xC0) != 0x80 ? 1 : 0;
  }
  return width;
}

std::string Truncated(std::string_view text, int width) {
  if (DisplayWidth(text) <= width) {
    return std::string(text);
  }
  std::string out;
  int used = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80 && ++used >= width) {
      break;
    }
    out += text[i];
  }
  return width > 0 ? out + "…" : std::string();
}

std::string HumanCount(double value) {
  if (!std::isfinite(value)) {
    return "-";
  }
  constexpr const char* kUnits[] = {"", "k", "M", "G", "T", "P"};
  int unit = 0;
  while (std::fabs(value) >= 999.95 && unit < 5) {
    value /= 1000;
    ++unit;
  }
  char text[40];
  const bool whole = unit == 0 && value == std::floor(value);
  std::snprintf(text, sizeof(text), whole ? "%.0f%s" : "%.1f%s", value, kUnits[unit]);
  return text;
}

std::string LossText(double loss) {
  if (!std::isfinite(loss)) {
    return "-";
  }
  char text[40];
  std::snprintf(text, sizeof(text), "%.4f", loss);
  return text;
}

std::string PercentText(double ratio) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.1f %%", ratio * 100);
  return text;
}

}  // namespace octavo
