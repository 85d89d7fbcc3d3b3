// CUDA against the CPU backend, op by op, over the table of cases (cases.cc), NUMERICS 12.
#include <gtest/gtest.h>

#include <cstdlib>

#include "kernels/cpu/backend.h"
#include "tests/ops/op_run.h"

namespace octavo::test {
namespace {

// OCTAVO_SEED repeats a failure; otherwise a fixed seed a case, so that runs can be compared.
std::uint64_t Seed(const OpCase& op_case) {
  if (const char* text = std::getenv("OCTAVO_SEED")) {
    return std::strtoull(text, nullptr, 10);
  }
  std::uint64_t hash = 1469598103934665603ull;
  for (const char* c = op_case.name; *c != '\0'; ++c) {
    hash = (hash ^ static_cast<unsigned char>(*c)) * 1099511628211ull;
  }
  return hash;
}

class OpParity : public testing::TestWithParam<OpCase> {};

TEST_P(OpParity, CudaAgreesWithCpu) {
  const CudaBackend& cuda = OpenCuda();
  if (cuda.backend.ops == nullptr) {
    GTEST_SKIP() << "no CUDA backend here: " << cuda.reason;
  }
  const OpCase& op_case = GetParam();
  const std::uint64_t seed = Seed(op_case);
  SCOPED_TRACE("seed " + std::to_string(seed) + " (set OCTAVO_SEED to repeat)");
  Backend cpu = CreateCpuBackend();
  {
    OpRun on_cpu(cpu, seed);
    op_case.run(on_cpu);
    ASSERT_EQ(on_cpu.Finish(), "");
    // Twice on the GPU: the second result must have the first one's bits wherever parity is exact,
    // and reuse of plans and scratch must not matter.
    for (int repeat = 0; repeat < 2; ++repeat) {
      OpRun on_cuda(cuda.backend, seed);
      op_case.run(on_cuda);
      ASSERT_EQ(on_cuda.Finish(), "");
      ASSERT_EQ(on_cpu.outputs().size(), on_cuda.outputs().size());
      for (std::size_t i = 0; i < on_cpu.outputs().size(); ++i) {
        EXPECT_EQ(Compare(on_cpu.outputs()[i], on_cuda.outputs()[i]), "") << "run " << repeat;
      }
    }
  }
  DestroyCpuBackend(&cpu);
}

// Every case runs on the CPU backend too, twice with the same bits, so that the table is exercised
// where there is no GPU.
TEST_P(OpParity, CpuIsReproducible) {
  const OpCase& op_case = GetParam();
  Backend cpu = CreateCpuBackend();
  {
    OpRun a(cpu, Seed(op_case)), b(cpu, Seed(op_case));
    op_case.run(a);
    op_case.run(b);
    ASSERT_EQ(a.Finish(), "");
    ASSERT_EQ(b.Finish(), "");
    for (std::size_t i = 0; i < a.outputs().size(); ++i) {
      EXPECT_EQ(a.outputs()[i].host, b.outputs()[i].host) << a.outputs()[i].name;
    }
  }
  DestroyCpuBackend(&cpu);
}

INSTANTIATE_TEST_SUITE_P(Table, OpParity, testing::ValuesIn(OpCases()),
                         [](const testing::TestParamInfo<OpCase>& info) {
                           return std::string(info.param.name);
                         });

// The comparison itself must be able to fail: a case run with two seeds does not agree with itself.
TEST(OpParityHarness, SeesADifference) {
  Backend cpu = CreateCpuBackend();
  int different = 0;
  {
    const OpCase& op_case = OpCases().front();
    OpRun a(cpu, 1), b(cpu, 2);
    op_case.run(a);
    op_case.run(b);
    ASSERT_EQ(a.Finish(), "");
    ASSERT_EQ(b.Finish(), "");
    for (std::size_t i = 0; i < a.outputs().size(); ++i) {
      different += Compare(a.outputs()[i], b.outputs()[i]).empty() ? 0 : 1;
    }
  }
  EXPECT_GT(different, 0);
  DestroyCpuBackend(&cpu);
}

}  // namespace
}  // namespace octavo::test
