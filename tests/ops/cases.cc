#include "tests/ops/cases.h"

namespace octavo::test {

const std::vector<OpCase>& OpCases() {
  static const std::vector<OpCase> all = [] {
    std::vector<OpCase> cases;
    for (const auto& family : {QuantizeCases(), GemmCases(), MoeCases(), ModelCases()}) {
      cases.insert(cases.end(), family.begin(), family.end());
    }
    return cases;
  }();
  return all;
}

}  // namespace octavo::test
