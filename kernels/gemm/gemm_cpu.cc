// Dense matrix product: shape checks around Product.
#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/gemm/product.h"
#include "kernels/quantize/quantize_block.h"

namespace octavo::cpu {

void Gemm(OpsContext* ops_context, const GemmArgs& args) {
  OCTAVO_CHECK(args.m >= 0 && args.n >= 0 && args.k >= 0, "gemm: [%lld, %lld, %lld]",
               static_cast<long long>(args.m), static_cast<long long>(args.n),
               static_cast<long long>(args.k));
  if (args.a.quant.present() && args.b.quant.present()) {
    CheckQTensor(args.a.quant, args.m, args.k, "gemm, A");
    CheckQTensor(args.b.quant, args.n, args.k, "gemm, B");
  }
  Product(Get(ops_context), {.m = args.m,
                             .n = args.n,
                             .k = args.k,
                             .a = MakeOperand(args.a, args.m, args.k),
                             .b = MakeOperand(args.b, args.n, args.k),
                             .c = args.c,
                             .c_dtype = args.c_dtype,
                             .ldc = args.ldc != 0 ? args.ldc : args.n,
                             .accumulate = args.accumulate});
}

}  // namespace octavo::cpu
