// Operators' words about a job's plan and policy: etags, pins, what the plan's reason says,
// repeats.
#include "controller/core/policy_verbs.h"

#include <gmock/gmock.h>

#include "controller/core/plans.h"
#include "controller/core/policy_driver.h"
#include "proto/convert/error_detail.h"
#include "tests/unit/controller/core/core_harness.h"

namespace octavo {
namespace {

using testing::HasSubstr;

class CorePolicyVerbs : public CoreHarness {
 protected:
  CorePolicyVerbs() { Begin(); }

  // A core with a policy, on what the store has.
  void Begin() {
    core_.reset();
    policy_ = std::make_unique<PolicyDriver>();
    core_ = std::make_unique<Core>(options_, &store_, policy_.get());
    ASSERT_TRUE(core_->Recover(now_).ok());
    core_->TakeEffects();
  }
  ~CorePolicyVerbs() override { core_.reset(); }

  absl::StatusOr<v1::JobPrecision> Say(v1::SetPolicyRequest::Action action,
                                       const std::string& layers = "", const std::string& op = "",
                                       const std::string& etag = "") {
    v1::SetPolicyRequest request;
    request.set_name("jobs/job");
    request.set_action(action);
    request.set_layers(layers);
    request.set_etag(etag);
    if (!op.empty()) {
      request.add_ops(op);
    }
    auto answer = core_->SetPolicy(request, "ann", now_);
    Settle();
    return answer;
  }
  static PlanEdit Edit(const std::string& layers, const std::string& op, const std::string& kind) {
    PlanEdit edit{.name = "job"};
    v1::PrecisionOverride& change = edit.overrides.emplace_back();
    change.set_layers(layers);
    if (!op.empty()) {
      change.add_ops(op);
    }
    change.mutable_recipe()->set_kind(kind);
    return edit;
  }
  std::string Etag() { return core_->Precision("job")->etag(); }
  // "1 fc2 pinned; …" as the status shows.
  std::string Sites() {
    std::string text;
    const auto precision = core_->Precision("job");
    for (const v1::PolicySite& site : precision->sites()) {
      StrAppend(&text, text.empty() ? "" : "; ", site.layer(), " ", site.op(), " ", site.status());
    }
    return text;
  }

  std::unique_ptr<PolicyDriver> policy_;
};

TEST_F(CorePolicyVerbs, EveryAcceptedWordChangesTheEtagAlsoAfterARestart) {
  ASSERT_TRUE(Submit(Spec("job")).ok());
  const std::string first = Etag();
  EXPECT_EQ(first, "p1");
  ASSERT_TRUE(Say(v1::SetPolicyRequest::PIN, "1", "fc2", first).ok());
  EXPECT_EQ(ErrorReason(Say(v1::SetPolicyRequest::PIN, "1", "fc2", first).status()), "STALE_ETAG");
  std::set<std::string> seen = {first, Etag()};
  for (const auto action :
       {v1::SetPolicyRequest::OFF, v1::SetPolicyRequest::ON, v1::SetPolicyRequest::OFF}) {
    ASSERT_TRUE(Say(action).ok());
    EXPECT_TRUE(seen.insert(Etag()).second) << Etag() << " came back";
  }
  const std::string before = Etag();
  Begin();
  EXPECT_EQ(Etag(), before);
  PlanEdit edit = Edit("1", "fc2", "bf16");
  edit.etag = first;
  EXPECT_EQ(ErrorReason(core_->SetPlan(edit, now_).status()), "STALE_ETAG");
  edit.etag = before;
  EXPECT_TRUE(core_->SetPlan(edit, now_).ok());
}

TEST_F(CorePolicyVerbs, AStatusTellsPinsFromChangedRecipesAndListsOnlyOpsThatExist) {
  ASSERT_TRUE(Submit(Spec("job")).ok());
  ASSERT_TRUE(Say(v1::SetPolicyRequest::PIN, "1").ok());
  EXPECT_EQ(Sites(),
            "1 attn_qkv pinned; 1 attn_out pinned; 1 fc1 pinned; 1 fc2 pinned; 1 dispatch pinned")
      << "MoE layers have no mlp_fc1";
  ASSERT_TRUE(core_->SetPlan(Edit("1", "fc2", "bf16"), now_).ok());
  EXPECT_THAT(Sites(), HasSubstr("1 fc1 pinned; 1 fc2 operator"));
  Settle();
  Begin();
  EXPECT_THAT(Sites(), HasSubstr("1 fc1 pinned; 1 fc2 operator"));
  ASSERT_TRUE(Say(v1::SetPolicyRequest::ON, "1").ok());
  EXPECT_EQ(Sites(), "");
  ASSERT_TRUE(core_->SetPlan({.name = "job", .rollback_to = 1}, now_).ok());
  EXPECT_EQ(Sites(), "1 fc2 operator");
}

TEST_F(CorePolicyVerbs, AReasonNamesOpsAndASingleLayerAsOne) {
  ASSERT_TRUE(Submit(Spec("job")).ok());
  EXPECT_THAT(core_->SetPlan(Edit("1", "fc2", "bf16"), now_)->plan().reason(),
              "layer 1 fc2 to bf16");
  EXPECT_THAT(core_->SetPlan(Edit("1-2", "", "bf16"), now_)->plan().reason(), "layers 1-2 to bf16");
  ASSERT_TRUE(Say(v1::SetPolicyRequest::PIN, "2", "fc1").ok());
  v1::ListEventsRequest list;
  list.set_name("jobs/job");
  const auto events = core_->Events(list);
  ASSERT_TRUE(events.ok()) << ToString(events.status());
  ASSERT_GT(events->events_size(), 0);
  EXPECT_EQ(events->events(events->events_size() - 1).message(), "layer 2 fc1 pinned by ann");
}

TEST_F(CorePolicyVerbs, AParameterThatTheRecipeLacksIsRefusedByName) {
  ASSERT_TRUE(Submit(Spec("job")).ok());
  PlanEdit edit = Edit("1", "", "bf16");
  edit.overrides[0].mutable_recipe()->set_margin(2);
  absl::Status status = core_->SetPlan(edit, now_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status), HasSubstr("margin"));
  EXPECT_THAT(Message(status), HasSubstr("bf16 takes no parameters"));
  edit = Edit("1", "fc1", "fp8_current");
  edit.overrides[0].mutable_recipe()->set_history_len(4);
  status = core_->SetPlan(edit, now_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status), HasSubstr("history_len"));
  EXPECT_THAT(Message(status), HasSubstr("fp8_current takes format, margin"));
  edit.overrides[0].mutable_recipe()->set_kind("fp8_delayed");
  EXPECT_TRUE(core_->SetPlan(edit, now_).ok());
}

TEST_F(CorePolicyVerbs, ARepeatedChangeIsAnsweredWithTheVersionItMade) {
  ASSERT_TRUE(Submit(Spec("job")).ok());
  PlanEdit first = Edit("1", "", "bf16");
  first.request_id = "request-1";
  ASSERT_EQ(core_->SetPlan(first, now_)->plan().version(), 2);
  ASSERT_EQ(core_->SetPlan(Edit("2", "", "bf16"), now_)->plan().version(), 3);
  EXPECT_EQ(core_->SetPlan(first, now_)->plan().version(), 2);
  Settle();
  Begin();
  EXPECT_EQ(core_->SetPlan(first, now_)->plan().version(), 2) << "also after a restart";
  EXPECT_EQ(core_->Precision("job")->plan().version(), 3);
}

}  // namespace
}  // namespace octavo
