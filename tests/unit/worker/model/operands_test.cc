// Operands of every product of the experts, as the kernels see them: formats, granularities and the
// kind of scales, for every recipe. A recipe that read another one's scales fails here.
#include <bit>
#include <map>
#include <set>
#include <string>

#include "base/str.h"
#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

constexpr std::int64_t kHidden = 128, kFfn = 256;

struct Seen {
  std::set<std::string> forms;  // "E4M3 row128 pow2 × E4M3 block128 pow2"
};

thread_local std::map<std::string, Seen>* seen = nullptr;
thread_local const Ops* inner = nullptr;

bool Pow2(float d) { return (std::bit_cast<std::uint32_t>(d) & 0x7FFFFFu) == 0; }

// Which scales the operand holds over its real rows.
std::string Form(const GemmOperand& operand, std::int64_t rows) {
  const QTensor& q = operand.quant;
  if (!q.present()) {
    return operand.dtype == DType::kBF16 ? "bf16" : "fp32";
  }
  const char* format = q.format == DType::kE4M3 ? "E4M3 " : "E5M2 ";
  if (q.tiling == Tiling::kTensor) {
    return StrCat(format, "tensor");  // one FP32 scale may be a power of two by chance
  }
  bool all_pow2 = true;
  const std::int64_t tile = q.tiling == Tiling::kRow32 ? 32 : 128;
  const std::int64_t step = q.tiling == Tiling::kBlock128 ? 128 : 1;
  for (std::int64_t r = 0; r < rows; r += step) {
    for (std::int64_t t = 0; t < q.cols / tile; ++t) {
      all_pow2 &= Pow2(q.dequant_scale[r / step * q.scale_row_stride + t * q.scale_tile_stride]);
    }
  }
  const char* tiling = q.tiling == Tiling::kRow128     ? "row128"
                       : q.tiling == Tiling::kBlock128 ? "block128"
                                                       : "row32";
  return StrCat(format, tiling, all_pow2 ? " pow2" : " fp32");
}

const Ops* RecordingOps(const Backend& backend) {
  inner = backend.ops;
  static Ops table = [](Ops ops) {
    ops.grouped_gemm = [](OpsContext* c, const GroupedGemmArgs& a) {
      // Dimensions tell the product: fc1 is [512, 128], fc2 [128, 256].
      const char* name = a.n == 2 * kFfn   ? "fc1 fprop"
                         : a.k == 2 * kFfn ? "fc1 dgrad"
                         : a.n == kHidden  ? "fc2 fprop"
                                           : "fc2 dgrad";
      (*seen)[name].forms.insert(Form(a.a, a.groups.padded_rows) + " × " +
                                 Form(a.b, a.groups.count * a.n));
      inner->grouped_gemm(c, a);
    };
    ops.grouped_wgrad = [](OpsContext* c, const GroupedWgradArgs& a) {
      (*seen)[a.m == 2 * kFfn ? "fc1 wgrad" : "fc2 wgrad"].forms.insert(Form(a.a, a.m) + " × " +
                                                                        Form(a.b, a.n));
      inner->grouped_wgrad(c, a);
    };
    return ops;
  }(*backend.ops);
  return &table;
}

std::map<std::string, Seen> OperandsOf(const Recipe& recipe) {
  std::map<std::string, Seen> result;
  seen = &result;
  ModelConfig model = SmallModel();
  model.layers = 1;
  model.experts = 2;
  model.expert_hidden = kFfn;
  InprocRanks ranks = InprocRanks::Make(1, 1);
  Backend backend = CreateCpuBackend();
  {
    ModelRank rank(model, SmallRun(recipe.kind == RecipeKind::kFp32), BuildPlan(1, recipe, 0, {}),
                   &ranks.ranks[0], RecordingOps(backend));
    const auto outcome = rank.Step(0);
    EXPECT_TRUE(outcome.ok()) << ToString(outcome.status());
  }
  DestroyCpuBackend(&backend);
  return result;
}

void Expect(const Recipe& recipe, const std::string& forward, const std::string& dgrad,
            const std::string& wgrad) {
  const auto operands = OperandsOf(recipe);
  ASSERT_EQ(operands.size(), 6u);
  for (const auto& [product, found] : operands) {
    const std::string& expected = product.find("fprop") != std::string::npos   ? forward
                                  : product.find("dgrad") != std::string::npos ? dgrad
                                                                               : wgrad;
    ASSERT_EQ(found.forms.size(), 1u) << product;
    EXPECT_EQ(*found.forms.begin(), expected) << DebugString(recipe) << ", " << product;
  }
}

TEST(Operands, HighPrecision) {
  Expect(DefaultRecipe(RecipeKind::kFp32), "fp32 × fp32", "fp32 × fp32", "fp32 × fp32");
  Expect(DefaultRecipe(RecipeKind::kBf16), "bf16 × bf16", "bf16 × bf16", "bf16 × bf16");
}

TEST(Operands, PerTensorKindsAreHybridPerExpert) {
  for (RecipeKind kind : {RecipeKind::kFp8Delayed, RecipeKind::kFp8Current}) {
    Expect(DefaultRecipe(kind), "E4M3 tensor × E4M3 tensor", "E5M2 tensor × E4M3 tensor",
           "E5M2 tensor × E4M3 tensor");
    Recipe e4m3 = DefaultRecipe(kind);
    e4m3.format = Fp8Format::kE4M3;
    Expect(e4m3, "E4M3 tensor × E4M3 tensor", "E4M3 tensor × E4M3 tensor",
           "E4M3 tensor × E4M3 tensor");
  }
}

TEST(Operands, Blockwise) {
  Recipe recipe = DefaultRecipe(RecipeKind::kFp8Blockwise);
  Expect(recipe, "E4M3 row128 fp32 × E4M3 block128 fp32", "E4M3 row128 fp32 × E4M3 block128 fp32",
         "E4M3 row128 fp32 × E4M3 row128 fp32");
  recipe.pow2_scales = true;
  Expect(recipe, "E4M3 row128 pow2 × E4M3 block128 pow2", "E4M3 row128 pow2 × E4M3 block128 pow2",
         "E4M3 row128 pow2 × E4M3 row128 pow2");
  recipe.format = Fp8Format::kHybrid;
  Expect(recipe, "E4M3 row128 pow2 × E4M3 block128 pow2", "E5M2 row128 pow2 × E4M3 block128 pow2",
         "E5M2 row128 pow2 × E4M3 row128 pow2");
  recipe.wgrad = WgradPrecision::kBf16;
  Expect(recipe, "E4M3 row128 pow2 × E4M3 block128 pow2", "E5M2 row128 pow2 × E4M3 block128 pow2",
         "bf16 × bf16");
}

TEST(Operands, Flow) {
  Recipe recipe = DefaultRecipe(RecipeKind::kFp8Flow);
  Expect(recipe, "E4M3 row128 pow2 × E4M3 block128 pow2", "E4M3 row128 pow2 × E4M3 block128 pow2",
         "E4M3 row128 pow2 × E4M3 row128 pow2");
  recipe.wgrad = WgradPrecision::kBf16;
  Expect(recipe, "E4M3 row128 pow2 × E4M3 block128 pow2", "E4M3 row128 pow2 × E4M3 block128 pow2",
         "bf16 × bf16");
}

TEST(Operands, Mx) {
  Expect(DefaultRecipe(RecipeKind::kMxfp8), "E4M3 row32 pow2 × E4M3 row32 pow2",
         "E4M3 row32 pow2 × E4M3 row32 pow2", "E4M3 row32 pow2 × E4M3 row32 pow2");
}

}  // namespace
}  // namespace octavo::testing
