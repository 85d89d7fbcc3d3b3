// Small texts shared by tables, views and JSON.
#pragma once

#include <google/protobuf/timestamp.pb.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace octavo {

// "2026-11-29T13:40:42.123Z"; "" for time zero.
std::string Rfc3339(const google::protobuf::Timestamp& time);
// "5m12s ago" against now, "now" below a second; "-" for time zero.
std::string Ago(const google::protobuf::Timestamp& time, std::int64_t now_unix_micros);

// "0x0123456789abcdef".
std::string HexHash(std::uint64_t hash);

// "jobs/a" → "a": what people type.
std::string BareName(std::string_view resource);
// "a" or "jobs/a" → "jobs/a".
std::string JobResource(std::string_view name);
std::string WorkerResource(std::string_view name);

// Safe on a terminal: control characters (escape sequences in a job's or worker's message) become
// '?', invalid UTF-8 U+FFFD. Newlines stay when `keep_newlines`.
std::string Printable(std::string_view text, bool keep_newlines = false);
// Invalid bytes become U+FFFD; everything else stays.
std::string ValidUtf8(std::string_view text);

// Columns that the text takes, counting one per character.
int DisplayWidth(std::string_view text);
// At most `width` columns, "…" at the end when cut.
std::string Truncated(std::string_view text, int width);

// "812", "12.3k", "4.56M", "1.20G": counts and rates in decimal units.
std::string HumanCount(double value);
// "2.3145", "-" when not finite.
std::string LossText(double loss);
// "41.3 %".
std::string PercentText(double ratio);

}  // namespace octavo
