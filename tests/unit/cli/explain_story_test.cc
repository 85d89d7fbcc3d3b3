// The words of octavo explain: similar events together, everything on demand.
#include "cli/explain_story.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/str.h"
#include "proto/convert/precision.h"

namespace octavo {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;

v1::PrecisionPlan Wire(PrecisionPlan plan, std::int64_t version, v1::PlanAuthor author,
                       const std::string& reason, std::int64_t applied) {
  plan.version = version;
  v1::PrecisionPlan wire = PlanToWire(plan);
  wire.set_author(author);
  wire.set_reason(reason);
  wire.set_applied_step(applied);
  return wire;
}

StoryInput Healthy(int layers) {
  StoryInput input;
  input.job.set_name("jobs/demo");
  input.job.set_state(v1::RUNNING);
  input.job.mutable_progress()->set_step(1000);
  input.job.mutable_progress()->set_total_steps(2000);
  input.job.mutable_progress()->set_first_loss(5.5);
  input.job.mutable_progress()->set_loss(2.25);
  v1::Attempt& attempt = *input.job.add_attempts();
  attempt.set_number(1);
  attempt.set_last_step(1000);
  input.precision.set_policy_enabled(true);
  input.plans.push_back(Wire(BuildPlan(layers, DefaultRecipe(RecipeKind::kFp8Delayed), 0, {}), 1,
                             v1::PLAN_AUTHOR_SPEC, "from the job's spec", 1));
  return input;
}

// fc2 of layers 1 to 3 falls, one after the other, and returns; again and again.
void AddFalls(StoryInput* input, int rounds) {
  PrecisionPlan plan = BuildPlan(5, DefaultRecipe(RecipeKind::kFp8Delayed), 0, {});
  std::int64_t version = 1, step = 400;
  for (int round = 0; round < rounds; ++round) {
    for (const bool fall : {true, false}) {
      for (int layer = 1; layer <= 3; ++layer) {
        plan.At(layer, Op::kFc2) =
            DefaultRecipe(fall ? RecipeKind::kBf16 : RecipeKind::kFp8Delayed);
        const std::string reason =
            fall ? StrCat("layer ", layer, " fc2 grad: amax_variation ", 2 + layer, ".5 > 2: a → b")
                 : StrCat("layer ", layer, " fc2: 5 good shadow snapshots running after 200 steps");
        input->plans.push_back(Wire(plan, ++version, v1::PLAN_AUTHOR_POLICY, reason, step += 10));
      }
    }
  }
}

TEST(ExplainStory, AHealthyJobIsThreeSentences) {
  EXPECT_THAT(
      ShortStory(Healthy(5)),
      ElementsAre("demo is RUNNING at step 1000 of 2000, loss 5.5000 at first and 2.2500 "
                  "now.",
                  "Attempt 1 began with fresh weights and reached step 1000.",
                  "Plan version 1 comes from the job's specification, all ranks run it from "
                  "step 1: from the job's spec."));
}

TEST(ExplainStory, SimilarDecisionsAreOneSentenceWithTheWorst) {
  StoryInput input = Healthy(5);
  AddFalls(&input, 4);
  const std::vector<std::string> story = ShortStory(input);
  EXPECT_THAT(story, Contains("The policy made 24 plan versions:"));
  EXPECT_THAT(
      story, Contains("Layers 1-3 fc2 fell from fp8_delayed to bf16 12 times between steps 410 and "
                      "610, because of amax_variation in its grad, worst 5.5 (limit 2) at layer "
                      "3."));
  EXPECT_THAT(story, Contains("Layers 1-3 fc2 went from bf16 to fp8_delayed 12 times between steps "
                              "440 and 640."));
  EXPECT_EQ(story.size(), 6u);
  EXPECT_EQ(FullStory(input).size(), 3u + 24u);
}

TEST(ExplainStory, AnAmaxThatFallsFarIsWorseThanOneThatRisesLittle) {
  StoryInput input = Healthy(3);
  PrecisionPlan plan = BuildPlan(3, DefaultRecipe(RecipeKind::kFp8Delayed), 0, {});
  plan.At(0, Op::kFc1) = DefaultRecipe(RecipeKind::kBf16);
  input.plans.push_back(
      Wire(plan, 2, v1::PLAN_AUTHOR_POLICY, "layer 0 fc1 input: amax_jump 12 > 10: a → b", 50));
  plan.At(2, Op::kFc1) = DefaultRecipe(RecipeKind::kBf16);
  input.plans.push_back(
      Wire(plan, 3, v1::PLAN_AUTHOR_POLICY, "layer 2 fc1 input: amax_jump 0.001 < 0.1: a → b", 60));
  EXPECT_THAT(ShortStory(input), Contains(HasSubstr("worst 0.001 (limit 0.1) at layer 2")));
  EXPECT_THAT(ShortStory(input), Contains(HasSubstr("Layers 0, 2 fc1 fell")));
}

TEST(ExplainStory, WarningsThatDifferInNumbersAreCounted) {
  StoryInput input = Healthy(3);
  for (int i = 1; i <= 30; ++i) {
    v1::JobEvent& event = input.events.emplace_back();
    event.set_kind("WARNING");
    event.set_step(i * 10);
    event.set_message(StrCat("layer ", i % 3, " fc1 input: amax_jump ", i, ".25 > 10"));
  }
  v1::JobEvent& other = input.events.emplace_back();
  other.set_kind("STATE");
  other.set_message("not a warning");
  const std::vector<std::string> story = ShortStory(input);
  EXPECT_EQ(story.back(),
            "layer 1 fc1 input: amax_jump 1.25 > 10 (30 such between steps 10 and 300).");
  EXPECT_EQ(story.size(), 4u);
  EXPECT_EQ(FullStory(input).size(), 33u);
}

TEST(ExplainStory, AnAttemptBeganWithWhatItLoaded) {
  StoryInput input = Healthy(3);
  input.job.mutable_spec()->mutable_checkpoint()->set_start_from("/ckpt/base");
  v1::Attempt& second = *input.job.add_attempts();
  second.set_number(2);
  for (const auto& story : {ShortStory(input), FullStory(input)}) {
    EXPECT_THAT(story, Contains("Attempt 1 began with the weights of /ckpt/base and reached step "
                                "1000."));
    EXPECT_THAT(story, Contains("Attempt 2 has not begun to train."));
  }
  input.job.mutable_attempts(1)->set_first_step(501);
  input.job.mutable_attempts(1)->set_loaded_checkpoint_step(500);
  input.job.mutable_attempts(1)->set_last_step(600);
  EXPECT_THAT(
      ShortStory(input),
      Contains("Attempt 2 continued from the checkpoint of step 500 and reached step 600."));
}

TEST(ExplainStory, TheLastWordAboutThePolicyIsToldAndIsNoWarning) {
  StoryInput input = Healthy(3);
  const auto say = [&input](const std::string& text) {
    v1::JobEvent& event = input.events.emplace_back();
    event.set_kind("POLICY");
    event.set_message(text);
  };
  say("policy off by an operator");
  say("policy on by an operator");
  EXPECT_EQ(
      ShortStory(input).back(),
      "Operators about the policy: policy off by an operator; then policy on by an operator.");
  say("layer 1 fc2 pinned by ann");
  say("policy off by ann");
  const std::vector<std::string> story = ShortStory(input);
  EXPECT_EQ(story.back(),
            "Operators about the policy (the last 3 of 4): policy on by an operator; then layer 1 "
            "fc2 pinned by ann; then policy off by ann.");
  EXPECT_THAT(story, testing::Not(Contains(HasSubstr("warnings"))));
}

TEST(ExplainStory, AnOperatorsPinIsNoFall) {
  StoryInput input = Healthy(3);
  v1::PolicySite& site = *input.precision.add_sites();
  site.set_layer(1);
  site.set_op("fc2");
  site.set_status("pinned");
  EXPECT_THAT(ShortStory(input),
              Contains("Layer 1 fc2 is pinned by an operator; the policy leaves it alone."));
  EXPECT_THAT(FullStory(input),
              Contains("Layer 1 fc2 is pinned by an operator; the policy leaves it alone."));
}

TEST(ExplainStory, SitesAreGroupedByWhatHoldsThem) {
  StoryInput input = Healthy(5);
  input.precision.set_policy_enabled(false);
  for (const char* op : {"fc1", "fc2"}) {
    for (int layer = 2; layer <= 3; ++layer) {
      v1::PolicySite& site = *input.precision.add_sites();
      site.set_layer(layer);
      site.set_op(op);
      site.set_status("operator");
    }
  }
  v1::PolicySite& fallen = *input.precision.add_sites();
  fallen.set_layer(1);
  fallen.set_op("attn_qkv");
  fallen.set_status("fallback");
  fallen.set_original("fp8_delayed");
  fallen.set_cause("saturated");
  const std::vector<std::string> story = ShortStory(input);
  EXPECT_THAT(story, Contains("The policy is off: nothing falls back or returns by itself."));
  EXPECT_THAT(story, Contains("Layers 2-3 fc1, fc2 are in an operator's hands; the policy leaves "
                              "them alone."));
  EXPECT_THAT(story, Contains("Layer 1 attn_qkv is held, fallen from fp8_delayed because of "
                              "saturated; it returns on good shadow statistics."));
}

TEST(ExplainStory, HoweverMuchHappenedTheStoryStaysShort) {
  StoryInput input = Healthy(40);
  input.job.mutable_progress()->set_retried_steps(3);
  input.precision.set_policy_enabled(false);
  for (int i = 2; i <= 30; ++i) {
    v1::Attempt& attempt = *input.job.add_attempts();
    attempt.set_number(i);
    attempt.set_end_class(i % 2 == 0 ? v1::RANK_EXIT : v1::NUMERIC_FAILURE);
  }
  PrecisionPlan plan = BuildPlan(40, DefaultRecipe(RecipeKind::kFp8Delayed), 0, {});
  for (int i = 0; i < 200; ++i) {
    const Op op = static_cast<Op>(i % 4);
    plan.At(i % 40, op) = DefaultRecipe(static_cast<RecipeKind>(1 + (i * 7) % 5));
    input.plans.push_back(
        Wire(plan, i + 2, i % 3 == 0 ? v1::PLAN_AUTHOR_OPERATOR : v1::PLAN_AUTHOR_POLICY,
             StrCat("layer ", i % 40, " ", Name(op), " input: ", i % 2 == 0 ? "flushed" : "sqnr",
                    " 0.", i, " > 0.05: x"),
             i + 10));
    v1::JobEvent& event = input.events.emplace_back();
    event.set_kind("WARNING");
    event.set_message(std::string(static_cast<std::size_t>(i % 20), 'x'));
    v1::PolicySite& site = *input.precision.add_sites();
    site.set_layer(i % 40);
    site.set_op(std::string(Name(op)));
    site.set_status(i % 3 == 0 ? "pinned" : "fallback");
    site.set_cause(StrCat("cause", i % 9));
    auto& mismatch = *input.precision.mutable_effective()->add_mismatches();
    mismatch.set_count(2);
    mismatch.set_reason("retry after a non-finite value");
  }
  const std::vector<std::string> story = ShortStory(input);
  EXPECT_LE(story.size(), static_cast<std::size_t>(kShortStorySentences));
  EXPECT_GE(story.size(), 15u);
  EXPECT_THAT(story, Contains(HasSubstr("There were 30 attempts; the earlier ones ended by")));
  EXPECT_THAT(story, Contains(HasSubstr("Operators made 67 plan versions")));
  EXPECT_THAT(story, Contains(HasSubstr("400 products of 200 ops ran otherwise than planned")));
  EXPECT_THAT(story, Contains(HasSubstr("octavo explain --all tells everything")));
}

}  // namespace
}  // namespace octavo
