#include "base/str.h"

#include <array>
#include <limits>

#include "gtest/gtest.h"

namespace octavo {
namespace {

TEST(Str, CatHandlesTextNumbersBoolsAndChars) {
  EXPECT_EQ(StrCat("a", std::string("b"), std::string_view("c"), 'd', 1, -2L, 2.5, true),
            "abcd1-22.5true");
  EXPECT_EQ(StrCat(std::numeric_limits<std::int64_t>::min()), "-9223372036854775808");
  EXPECT_EQ(StrCat(), "");
}

TEST(Str, SplitAndJoinAreInverse) {
  for (const char* text : {"", ",", "a", "a,,b", ",a,"}) {
    EXPECT_EQ(StrJoin(StrSplit(text, ','), ","), text);
  }
  EXPECT_EQ(StrSplit("a,,b", ',').size(), 3u);
}

TEST(Str, StripSpaceRemovesBothEnds) {
  EXPECT_EQ(StripSpace(" \t a b \r\n"), "a b");
  EXPECT_EQ(StripSpace(" \n"), "");
}

TEST(Str, NumbersAreParsedStrictly) {
  EXPECT_EQ(ParseInt64("-9223372036854775808"), std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(ParseDouble("1e-3"), 1e-3);
  for (const char* bad : {"", " 1", "1 ", "+1", "1x", "9223372036854775808", "0x10"}) {
    EXPECT_FALSE(ParseInt64(bad).has_value()) << bad;
  }
  for (const char* bad : {"", "nan", "inf", "1.0.0", "1e999", " 1"}) {
    EXPECT_FALSE(ParseDouble(bad).has_value()) << bad;
  }
}

TEST(Str, HumanUnitsNeverOverflowTheirUnit) {
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1536), "1.5 KiB");
  EXPECT_EQ(HumanBytes(1024.0 * 1024 - 1), "1.0 MiB");
  EXPECT_EQ(HumanDuration(0.35), "350 ms");
  EXPECT_EQ(HumanDuration(0.9999), "1.0 s");
  EXPECT_EQ(HumanDuration(59.99), "1m00s");
  EXPECT_EQ(HumanDuration(245), "4m05s");
  EXPECT_EQ(HumanDuration(2 * 3600 + 13 * 60), "2h13m");
  EXPECT_EQ(HumanDuration(3 * 86400 + 4 * 3600), "3d04h");
  EXPECT_EQ(HumanDuration(-5), "-5.0 s");
}

TEST(Str, EditDistanceCountsInsertDeleteSubstituteAndSwap) {
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
  EXPECT_EQ(EditDistance("learnign", "learning"), 1);
  EXPECT_EQ(EditDistance("same", "same"), 0);
}

TEST(Str, NearestMatchSuggestsTyposAndRefusesStrangers) {
  const std::array<const char*, 3> names = {"learning_rate", "hidden", "experts"};
  EXPECT_EQ(NearestMatch("learnig_rate", names), "learning_rate");
  EXPECT_EQ(NearestMatch("hiden", names), "hidden");
  EXPECT_EQ(NearestMatch("optimizer", names), std::nullopt);
  EXPECT_EQ(NearestMatch("xy", names), std::nullopt);
}

}  // namespace
}  // namespace octavo
