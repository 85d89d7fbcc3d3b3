#include "base/status.h"

#include <memory>

#include "base/str.h"
#include "gtest/gtest.h"

namespace octavo {
namespace {

absl::StatusOr<std::unique_ptr<int>> MakePositive(int value) {
  if (value <= 0) {
    return InvalidArgumentError(StrCat("value ", value, " must be positive"));
  }
  return std::make_unique<int>(value);
}

absl::StatusOr<int> Sum(int a, int b) {
  ASSIGN_OR_RETURN(const std::unique_ptr<int> x, MakePositive(a));
  ASSIGN_OR_RETURN(const std::unique_ptr<int> y, MakePositive(b));
  RETURN_IF_ERROR(MakePositive(*x + *y - 5));
  return *x + *y;
}

TEST(Status, MacrosPassTheFirstErrorAndMoveOnlyValues) {
  EXPECT_EQ(*Sum(4, 3), 7);
  EXPECT_EQ(ToString(Sum(-1, 3).status()), "INVALID_ARGUMENT: value -1 must be positive");
  EXPECT_EQ(ToString(Sum(1, 2).status()), "INVALID_ARGUMENT: value -2 must be positive");
}

TEST(Status, AnnotateKeepsCodeAndPayloadsAndLeavesOkAlone) {
  absl::Status status = NotFoundError("no such file");
  status.SetPayload("type/field", absl::Cord("model.hidden"));
  const absl::Status annotated = Annotate(status, "loading a.yaml");
  EXPECT_EQ(ToString(annotated), "NOT_FOUND: loading a.yaml: no such file");
  EXPECT_EQ(annotated.GetPayload("type/field"), absl::Cord("model.hidden"));
  EXPECT_TRUE(Annotate(absl::OkStatus(), "x").ok());
}

TEST(Status, UpdateKeepsTheFirstError) {
  absl::Status first;
  UpdateStatus(&first, absl::OkStatus());
  EXPECT_TRUE(first.ok());
  UpdateStatus(&first, UnavailableError("first"));
  UpdateStatus(&first, DataLossError("second"));
  EXPECT_EQ(ToString(first), "UNAVAILABLE: first");
}

}  // namespace
}  // namespace octavo
