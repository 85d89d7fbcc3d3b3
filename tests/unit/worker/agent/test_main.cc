// The test binary is also the fake rank program that the real daemon starts and probes.
#include <cstdio>
#include <string_view>

#include "gtest/gtest.h"
#include "tests/unit/worker/agent/fake_rank.h"

int main(int argc, char** argv) {
  const std::string_view first = argc > 1 ? argv[1] : "";
  if (first == "--probe") {
    std::puts("{\"device_name\": \"fake\", \"memory_bytes\": 1024}");
    return 0;
  }
  if (first == "--socket") {
    return octavo::FakeRankMain(argc, argv);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
