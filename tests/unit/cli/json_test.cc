#include "cli/output/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "octavo/v1/job.pb.h"
#include "octavo/v1/job_service.pb.h"

namespace octavo {
namespace {

TEST(JsonWriterTest, WritesNestedValuesInTheOrderGiven) {
  JsonWriter json;
  json.BeginObject().Key("b").Int(-3).Key("a").BeginArray().Double(0.1).Null().Bool(true);
  json.EndArray().Key("empty").BeginArray().EndArray().Key("o").BeginObject().EndObject();
  EXPECT_EQ(json.EndObject().Take(),
            "{\n  \"b\": -3,\n  \"a\": [\n    0.1,\n    null,\n    true\n  ],\n"
            "  \"empty\": [],\n  \"o\": {}\n}");
}

TEST(JsonWriterTest, NumbersAreNumbers) {
  JsonWriter json(0);
  json.BeginArray().Int(std::numeric_limits<std::int64_t>::min()).Uint(UINT64_MAX);
  json.Double(1e300).Double(std::nan("")).Double(-INFINITY).Float(0.95f).EndArray();
  EXPECT_EQ(json.Take(), "[-9223372036854775808, 18446744073709551615, 1e+300, null, null, 0.95]");
}

TEST(JsonWriterTest, TextIsEscapedAndAlwaysValidUtf8) {
  JsonWriter json(0);
  json.BeginArray().String("a\"b\\c\n\t\r\x01\x7f").String("é…").String("\xff\xc3").EndArray();
  EXPECT_EQ(json.Take(),
            "[\"a\\\"b\\\\c\\n\\t\\r\\u0001\\u007f\", \"é…\", \"\xEF\xBF\xBD\xEF\xBF\xBD\"]");
}

// The golden file of one job: names, order and kinds are a promise to scripts.
TEST(ToJsonTest, AJobPrintsAsThisText) {
  v1::Attempt attempt;
  attempt.set_number(1);
  attempt.mutable_start_time()->set_seconds(1764423642);
  attempt.mutable_start_time()->set_nanos(123456789);
  attempt.set_end_class(v1::WORKER_LOST);
  attempt.set_last_step(7);
  v1::Placement* placement = attempt.add_placements();
  placement->set_rank(1);
  placement->set_worker("workers/w0");
  EXPECT_EQ(ToJson(attempt), R"({
  "number": 1,
  "placements": [
    {
      "rank": 1,
      "worker": "workers/w0",
      "slot": 0
    }
  ],
  "start_time": "2025-11-29T13:40:42.123Z",
  "end_class": "WORKER_LOST",
  "end_reason": "",
  "first_step": 0,
  "last_step": 7,
  "loaded_checkpoint_step": 0
}
)");
}

TEST(ToJsonTest, MapsAreSortedAndUnsetMessagesLeftOut) {
  v1::JobSpec spec;
  (*spec.mutable_labels())["z"] = "1";
  (*spec.mutable_labels())["a"] = "2";
  EXPECT_EQ(ToJsonLine(spec),
            "{\"name\": \"\", \"owner\": \"\", \"priority\": 0, \"labels\": {\"a\": \"2\", \"z\": "
            "\"1\"}, \"device\": \"\"}\n");
}

TEST(ToJsonTest, OptionalFieldsAppearWhenSetEvenToFalse) {
  v1::Recipe recipe;
  EXPECT_EQ(ToJsonLine(recipe).find("pow2_scales"), std::string::npos);
  recipe.set_pow2_scales(false);
  EXPECT_NE(ToJsonLine(recipe).find("\"pow2_scales\": false"), std::string::npos);
}

TEST(ToJsonTest, HashesAreTextAndUnknownEnumerationsStayReadable) {
  v1::PrecisionPlan plan;
  plan.set_semantic_hash(0xfedcba9876543210u);
  plan.set_version(12);
  plan.set_author(static_cast<v1::PlanAuthor>(9));
  const std::string text = ToJsonLine(plan);
  EXPECT_NE(text.find("\"semantic_hash\": \"0xfedcba9876543210\""), std::string::npos) << text;
  EXPECT_NE(text.find("\"version\": 12,"), std::string::npos) << text;
  EXPECT_NE(text.find("\"author\": \"UNKNOWN_9\""), std::string::npos) << text;
}

}  // namespace
}  // namespace octavo
