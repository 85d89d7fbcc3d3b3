// Operands of every product of the experts, as the kernels see them: formats, granularities and the
// kind of scales, for every recipe. A recipe that read another one's scales fails here.
#include <bit>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/str.h"
#include "kernels/formats/scale.h"
#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

constexpr std::int64_t kHidden = 128, kFfn = 256;

struct Seen {
  std::set<std::string> forms;        // "E4M3 row128 pow2 × E4M3 block128 pow2"
  std::vector<float> dequant_scales;  // of A, per group, of the last call; per-tensor scaling only
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

// By dimensions: qkv is [256, 128], the dense MLP's fc1 [768, 128] and fc2 [128, 384]. "": none of
// these (the head, the router, attention's output).
std::string DenseProduct(const GemmArgs& a) {
  const std::pair<std::int64_t, std::int64_t> kShapes[] = {{256, 128}, {768, 128}, {128, 384}};
  const char* kNames[] = {"attn_qkv ", "mlp_fc1 ", "mlp_fc2 "};
  for (int i = 0; i < 3; ++i) {
    const auto [n, k] = kShapes[i];
    if (!a.accumulate && a.n == n && a.k == k) {
      return std::string(kNames[i]) + "fprop";
    }
    if (!a.accumulate && a.n == k && a.k == n) {
      return std::string(kNames[i]) + "dgrad";
    }
    if (a.accumulate && a.m == n && a.n == k) {
      return std::string(kNames[i]) + "wgrad";
    }
  }
  return "";
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
      if (a.a.quant.present() && a.a.quant.tiling == Tiling::kTensor) {
        (*seen)[name].dequant_scales.assign(a.a.quant.dequant_scale,
                                            a.a.quant.dequant_scale + a.groups.count);
      }
      inner->grouped_gemm(c, a);
    };
    ops.grouped_wgrad = [](OpsContext* c, const GroupedWgradArgs& a) {
      (*seen)[a.m == 2 * kFfn ? "fc1 wgrad" : "fc2 wgrad"].forms.insert(Form(a.a, a.m) + " × " +
                                                                        Form(a.b, a.n));
      inner->grouped_wgrad(c, a);
    };
    ops.gemm = [](OpsContext* c, const GemmArgs& a) {
      const std::string product = DenseProduct(a);
      if (!product.empty()) {
        // A wgrad's operands are column-wise copies: [n, tokens] and [k, tokens].
        (*seen)[product].forms.insert(Form(a.a, a.m) + " × " + Form(a.b, a.n));
      }
      inner->gemm(c, a);
    };
    return ops;
  }(*backend.ops);
  return &table;
}

ModelConfig ExpertModel() {
  ModelConfig model = SmallModel();
  model.layers = 1;
  model.experts = 2;
  model.expert_hidden = kFfn;
  return model;
}
ModelConfig DenseModel() {
  ModelConfig model = SmallModel();
  model.layers = 1;
  model.dense_layers = {0};
  model.dense_hidden = 384;
  return model;
}

std::map<std::string, Seen> OperandsOf(const ModelConfig& model, const Recipe& recipe) {
  std::map<std::string, Seen> result;
  seen = &result;
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

// Of all products of experts, attention and dense MLPs.
void Expect(const Recipe& recipe, const std::string& forward, const std::string& dgrad,
            const std::string& wgrad) {
  auto operands = OperandsOf(ExpertModel(), recipe);
  ASSERT_EQ(operands.size(), 6u + 3u) << "fc1, fc2, attn_qkv";
  operands.merge(OperandsOf(DenseModel(), recipe));
  ASSERT_EQ(operands.size(), 6u + 9u);
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

// Forms cannot tell these two apart, values can: fp8_delayed multiplies by what the window of its
// expert held before the step, fp8_current by the amax of the rows at hand.
TEST(Operands, DelayedScalesComeFromTheWindowAndCurrentOnesFromTheRows) {
  const ModelConfig model = ExpertModel();
  for (const RecipeKind kind : {RecipeKind::kFp8Delayed, RecipeKind::kFp8Current}) {
    std::map<std::string, Seen> result;
    seen = &result;
    InprocRanks ranks = InprocRanks::Make(1, 1);
    Backend backend = CreateCpuBackend();
    {
      ModelRank rank(model, SmallRun(false), Uniform(model, kind), &ranks.ranks[0],
                     RecordingOps(backend));
      ASSERT_TRUE(rank.Step(0).ok());
      const std::vector<float> first = result["fc2 fprop"].dequant_scales;
      std::map<std::string, float> window;  // Q by name, before the second step
      for (const StateTensor& state : rank.model().ExportState()) {
        window[state.name] = state.values[0];
        const bool grad = state.name.find(".grad") != std::string::npos;
        EXPECT_EQ(state.values[0],  // one amax so far
                  QuantScaleFromAmax(state.values[2], grad ? 57344.0f : 448.0f, false, 0))
            << state.name;
      }
      ASSERT_TRUE(rank.Step(1).ok());
      const std::vector<float> second = result["fc2 fprop"].dequant_scales;
      ASSERT_EQ(second.size(), 2u);
      for (std::size_t e = 0; e < 2; ++e) {
        float amax = 0;  // of the second step's rows
        for (std::size_t i = 0; i < rank.model().stat_sites().size(); ++i) {
          const TensorSite& site = rank.model().stat_sites()[i];
          if (site.site == OpSite{0, Op::kFc2} && site.tensor == Tensor::kInput &&
              site.expert == static_cast<std::int32_t>(e)) {
            amax = rank.model().stats()[i].amax;
          }
        }
        const float from_rows = 1.0f / QuantScaleFromAmax(amax, 448.0f, false, 0);
        if (kind == RecipeKind::kFp8Delayed) {
          EXPECT_EQ(second[e], 1.0f / window.at(StrCat("precision.0.fc2.input.", e)));
          EXPECT_EQ(second[e], first[e]) << "the first step primed with what it pushed";
          EXPECT_NE(second[e], from_rows);
        } else {
          EXPECT_EQ(second[e], from_rows);
          EXPECT_NE(second[e], first[e]);
        }
      }
      EXPECT_NE(second[0], second[1]) << "experts have scales of their own";
    }
    DestroyCpuBackend(&backend);
  }
}

// What travels: rule and format of the casts of x and dY before dispatch.
TEST(Operands, PayloadOfEveryRecipe) {
  static thread_local std::vector<std::string>* payload = nullptr;
  static thread_local std::vector<std::pair<const void*, std::string>>* casts = nullptr;
  const auto payloads = [](RecipeKind kind) {
    std::vector<std::string> result;
    std::vector<std::pair<const void*, std::string>> made;
    payload = &result;
    casts = &made;
    InprocRanks ranks = InprocRanks::Make(1, 1);
    Backend backend = CreateCpuBackend();
    inner = backend.ops;
    Ops table = *backend.ops;
    table.quantize_rows = [](OpsContext* c, const QuantizeRowsArgs& a) {
      casts->emplace_back(
          a.row.q, StrCat(a.rule.format == DType::kE4M3 ? "E4M3 " : "E5M2 ",
                          a.rule.tiling == Tiling::kRow32 ? "row32" : "row128",
                          a.rule.pow2 || a.rule.tiling == Tiling::kRow32 ? " pow2" : " fp32"));
      inner->quantize_rows(c, a);
    };
    table.permute = [](OpsContext* c, const PermuteArgs& a) {
      std::string form = a.tiles == 0 ? "bf16" : "unknown";
      for (const auto& [codes, cast] : *casts) {
        form = a.tiles > 0 && codes == a.src.payload ? cast : form;
      }
      payload->push_back(form);
      inner->permute(c, a);
    };
    {
      const ModelConfig model = ExpertModel();
      ModelRank rank(model, SmallRun(false), Uniform(model, kind), &ranks.ranks[0], &table);
      EXPECT_TRUE(rank.Step(0).ok());
    }
    DestroyCpuBackend(&backend);
    return result;
  };
  const auto both = [](const char* x) { return std::vector<std::string>{x, x}; };  // x, dY
  EXPECT_EQ(payloads(RecipeKind::kBf16), both("bf16"));
  EXPECT_EQ(payloads(RecipeKind::kFp8Delayed), both("E4M3 row128 pow2"));
  EXPECT_EQ(payloads(RecipeKind::kFp8Current), both("E4M3 row128 pow2"));
  EXPECT_EQ(payloads(RecipeKind::kFp8Blockwise), both("E4M3 row128 fp32"));
  EXPECT_EQ(payloads(RecipeKind::kFp8Flow), both("E4M3 row128 pow2"));
  EXPECT_EQ(payloads(RecipeKind::kMxfp8), both("E4M3 row32 pow2"));
}

}  // namespace
}  // namespace octavo::testing
