#include "proto/precision/recipe.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <system_error>

namespace octavo {
namespace {

constexpr std::string_view kKindNames[kRecipeKindCount] = {
    "fp32", "bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "fp8_flow", "mxfp8"};

constexpr std::int32_t kHistoryMax = 4096;
constexpr std::int32_t kMarginMax = 8;
// Largest minimum of D that still lets a healthy activation (amax about 1) use the format's range.
constexpr float kMinDequantScaleMax = 1.0f;

std::string Number(double value) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

bool HasMinDequantScale(const Recipe& r) { return r.is_fp8() && r.kind != RecipeKind::kMxfp8; }

// Which formats the kind allows besides E4M3 everywhere.
bool AllowsHybrid(RecipeKind kind) {
  return kind == RecipeKind::kFp8Delayed || kind == RecipeKind::kFp8Current ||
         kind == RecipeKind::kFp8Blockwise;
}

bool AllowsDispatch(RecipeKind kind) {
  return kind != RecipeKind::kFp8Delayed && kind != RecipeKind::kFp8Current;
}

bool ParseInt32(std::string_view text, std::int32_t* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

bool ParseFloat(std::string_view text, float* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

// Sets *value to `first` or `second` by which of the two words the text is.
template <class T>
bool ParseWord(std::string_view text, std::string_view word1, T first, std::string_view word2,
               T second, T* value) {
  if (text != word1 && text != word2) {
    return false;
  }
  *value = text == word1 ? first : second;
  return true;
}

bool SetParameter(std::string_view key, std::string_view value, Recipe* r) {
  if (key == "format") {
    return ParseWord(value, "hybrid", Fp8Format::kHybrid, "e4m3", Fp8Format::kE4M3, &r->format);
  }
  if (key == "history_len") {
    return ParseInt32(value, &r->history_len);
  }
  if (key == "amax_algo") {
    return ParseWord(value, "max", AmaxAlgorithm::kMax, "most_recent", AmaxAlgorithm::kMostRecent,
                     &r->amax_algo);
  }
  if (key == "margin") {
    return ParseInt32(value, &r->margin);
  }
  if (key == "pow2_scales") {
    return ParseWord(value, "true", true, "false", false, &r->pow2_scales);
  }
  if (key == "accumulate") {
    return ParseWord(value, "fast", AccumulateMode::kFast, "promoted", AccumulateMode::kPromoted,
                     &r->accumulate);
  }
  if (key == "min_dequant_scale") {
    return ParseFloat(value, &r->min_dequant_scale);
  }
  if (key == "wgrad") {
    return ParseWord(value, "bf16", WgradPrecision::kBf16, "fp8", WgradPrecision::kFp8, &r->wgrad);
  }
  return false;
}

}  // namespace

Recipe DefaultRecipe(RecipeKind kind) {
  Recipe recipe;
  recipe.kind = kind;
  recipe.format = recipe.is_per_tensor() ? Fp8Format::kHybrid : Fp8Format::kE4M3;
  recipe.pow2_scales = kind == RecipeKind::kFp8Flow || kind == RecipeKind::kMxfp8;
  return recipe;
}

std::string_view Name(RecipeKind kind) { return kKindNames[static_cast<std::size_t>(kind)]; }

std::optional<RecipeKind> ParseRecipeKind(std::string_view text) {
  for (int i = 0; i < kRecipeKindCount; ++i) {
    if (kKindNames[i] == text) {
      return static_cast<RecipeKind>(i);
    }
  }
  return std::nullopt;
}

std::vector<std::string> RecipeParameters(RecipeKind kind) {
  switch (kind) {
    case RecipeKind::kFp32:
    case RecipeKind::kBf16:
      return {};
    case RecipeKind::kFp8Delayed:
      return {"format",     "history_len",       "amax_algo", "margin",
              "accumulate", "min_dequant_scale", "wgrad"};
    case RecipeKind::kFp8Current:
      return {"format", "margin", "accumulate", "min_dequant_scale", "wgrad"};
    case RecipeKind::kFp8Blockwise:
      return {"format", "pow2_scales", "accumulate", "min_dequant_scale", "wgrad"};
    case RecipeKind::kFp8Flow:
      return {"accumulate", "min_dequant_scale", "wgrad"};
    case RecipeKind::kMxfp8:
      return {"accumulate", "wgrad"};
  }
  return {};
}

std::vector<std::string> RecipeKindNames() {
  std::vector<std::string> names;
  for (std::string_view name : kKindNames) {
    names.emplace_back(name);
  }
  return names;
}

std::string DebugString(const Recipe& recipe) {
  std::string text(Name(recipe.kind));
  if (!recipe.is_fp8()) {
    return text;
  }
  std::string inside;
  const auto add = [&inside](std::string_view key, std::string_view value) {
    if (!inside.empty()) {
      inside += ",";
    }
    inside += key;
    inside += "=";
    inside += value;
  };
  if (AllowsHybrid(recipe.kind)) {
    add("format", recipe.format == Fp8Format::kHybrid ? "hybrid" : "e4m3");
  }
  if (recipe.kind == RecipeKind::kFp8Delayed) {
    add("history_len", std::to_string(recipe.history_len));
    add("amax_algo", recipe.amax_algo == AmaxAlgorithm::kMax ? "max" : "most_recent");
  }
  if (recipe.is_per_tensor()) {
    add("margin", std::to_string(recipe.margin));
  }
  if (recipe.kind == RecipeKind::kFp8Blockwise) {
    add("pow2_scales", recipe.pow2_scales ? "true" : "false");
  }
  if (recipe.accumulate != AccumulateMode::kDefault) {
    add("accumulate", recipe.accumulate == AccumulateMode::kFast ? "fast" : "promoted");
  }
  if (HasMinDequantScale(recipe) && recipe.min_dequant_scale != 0) {
    add("min_dequant_scale", Number(recipe.min_dequant_scale));
  }
  if (recipe.wgrad == WgradPrecision::kBf16) {
    add("wgrad", "bf16");
  }
  return inside.empty() ? text : text + "(" + inside + ")";
}

std::optional<Recipe> ParseRecipe(std::string_view text) {
  const std::size_t open = text.find('(');
  const std::optional<RecipeKind> kind = ParseRecipeKind(text.substr(0, open));
  if (!kind.has_value()) {
    return std::nullopt;
  }
  Recipe recipe = DefaultRecipe(*kind);
  if (open == std::string_view::npos) {
    return recipe;
  }
  if (text.back() != ')' || !recipe.is_fp8()) {
    return std::nullopt;
  }
  std::string_view rest = text.substr(open + 1, text.size() - open - 2);
  while (true) {
    const std::size_t comma = rest.find(',');
    const std::string_view pair = rest.substr(0, comma);
    const std::size_t equals = pair.find('=');
    if (equals == std::string_view::npos ||
        !SetParameter(pair.substr(0, equals), pair.substr(equals + 1), &recipe)) {
      return std::nullopt;
    }
    if (comma == std::string_view::npos) {
      return recipe;
    }
    rest.remove_prefix(comma + 1);
  }
}

std::uint64_t SemanticHash(const Recipe& recipe) {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, 64 bits
  for (char c : DebugString(recipe)) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  return hash;
}

std::string ValidateRecipe(const Recipe& recipe, Op op) {
  const std::string name(Name(recipe.kind));
  if (op == Op::kDispatch && !AllowsDispatch(recipe.kind)) {
    return "recipe " + name +
           " cannot carry the dispatch payload (one scale per tensor does not travel); valid for "
           "dispatch: bf16, fp32, fp8_blockwise, fp8_flow, mxfp8";
  }
  if (!recipe.is_fp8()) {
    return {};
  }
  if (recipe.format == Fp8Format::kHybrid && !AllowsHybrid(recipe.kind)) {
    return "recipe " + name +
           " uses E4M3 for gradients too; format: hybrid is valid for "
           "fp8_delayed, fp8_current, fp8_blockwise";
  }
  if (recipe.kind == RecipeKind::kFp8Delayed &&
      (recipe.history_len < 1 || recipe.history_len > kHistoryMax)) {
    return "history_len is " + std::to_string(recipe.history_len) + "; valid is 1 to " +
           std::to_string(kHistoryMax);
  }
  if (recipe.margin < 0 || recipe.margin > kMarginMax) {
    return "margin is " + std::to_string(recipe.margin) + "; valid is 0 to " +
           std::to_string(kMarginMax);
  }
  if (recipe.margin != 0 && !recipe.is_per_tensor()) {
    return "margin is " + std::to_string(recipe.margin) + " but recipe " + name +
           " takes none; valid for fp8_delayed and fp8_current";
  }
  if (recipe.pow2_scales && recipe.is_per_tensor()) {
    return "pow2_scales is true but recipe " + name +
           " has FP32 scales; valid for fp8_blockwise (fp8_flow and mxfp8 always have them)";
  }
  if (!recipe.pow2_scales &&
      (recipe.kind == RecipeKind::kFp8Flow || recipe.kind == RecipeKind::kMxfp8)) {
    return "pow2_scales is false but recipe " + name + " needs power-of-two scales";
  }
  if (!(std::isfinite(recipe.min_dequant_scale) && recipe.min_dequant_scale >= 0 &&
        recipe.min_dequant_scale <= kMinDequantScaleMax)) {
    return "min_dequant_scale is " + Number(recipe.min_dequant_scale) + "; valid is 0 (off) to " +
           Number(kMinDequantScaleMax);
  }
  if (recipe.min_dequant_scale != 0 && !HasMinDequantScale(recipe)) {
    return "min_dequant_scale is set but recipe " + name + " takes none";
  }
  return {};
}

std::int64_t DimensionMultiple(RecipeKind kind) {
  switch (kind) {
    case RecipeKind::kFp32:
    case RecipeKind::kBf16:
      return 2;
    case RecipeKind::kFp8Delayed:
    case RecipeKind::kFp8Current:
      return 16;
    case RecipeKind::kFp8Blockwise:
    case RecipeKind::kFp8Flow:
      return 128;
    case RecipeKind::kMxfp8:
      return 32;
  }
  return 1;
}

Recipe PayloadRecipe(const Recipe& layer_recipe) {
  if (!layer_recipe.is_per_tensor()) {
    return layer_recipe;
  }
  Recipe payload = DefaultRecipe(RecipeKind::kFp8Blockwise);
  payload.pow2_scales = true;
  return payload;
}

std::string RefusalReason(const Recipe& recipe, const DeviceAbility& device, bool allow_emulation) {
  const std::string name(Name(recipe.kind));
  const std::string here = "SM " + std::to_string(device.sm);
  if (recipe.kind == RecipeKind::kFp32) {
    return device.is_cuda ? "recipe fp32 is an oracle for the CPU backend; a GPU runs bf16 or FP8"
                          : "";
  }
  if (!recipe.is_fp8()) {
    return {};
  }
  if (device.is_cuda && device.sm < 89) {
    return "recipe " + name + " needs SM 89 or later; this device is " + here;
  }
  const bool native_mx = device.is_cuda && device.sm >= 100;
  if (recipe.kind == RecipeKind::kMxfp8 && !native_mx && !allow_emulation) {
    return "recipe mxfp8 has tensor cores from SM 100 on; this device (" +
           (device.is_cuda ? here : std::string("CPU")) +
           ") would emulate it: set allow_emulation: true to accept that";
  }
  return {};
}

}  // namespace octavo
