// OpenBLAS behind one function, single-threaded, and the choice of its kernels.
//
// OpenBLAS picks its kernels by CPU model when it is loaded; Debian 12's 0.3.21 takes recent Xeons
// for a Prescott and loses a factor of five. OPENBLAS_CORETYPE overrides the choice but is read
// before main, so a rank does
//
//   int main(int argc, char** argv) {
//     octavo::MaybeRunBlasProbe(argc, argv);   // does not return in a probe child
//     octavo::EnsureBlasCoreType(argv);        // may re-execute this program, once
//     ...
//
// A core type that the user set is respected. Programs without these calls work, only slower.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octavo {

// Which matrix is stored how: kNo is row-major as named, kYes its transpose.
enum class Transposed : bool { kNo, kYes };

// C[M,N] = A[M,K]·B[K,N] + beta·C, row-major FP32, beta 0 (C may hold anything) or 1.
struct SgemmArgs {
  std::int64_t m, n, k;
  const float* a;  // [M,K], or [K,M] when transposed
  Transposed a_transposed;
  std::int64_t lda;
  const float* b;  // [K,N], or [N,K] when transposed
  Transposed b_transposed;
  std::int64_t ldb;
  float* c;
  std::int64_t ldc;
  float beta;
};
void Sgemm(const SgemmArgs& args);

// The kernels that OpenBLAS uses in this process, e.g. "SkylakeX". Recorded in checkpoints: bitwise
// resume needs the same ones.
const char* BlasCoreType();

// When argv asks for a probe (ChooseBlasCoreType's hidden flag): checks sgemm against FP64 on odd
// shapes, times it, prints one line and exits.
void MaybeRunBlasProbe(int argc, char** argv);

// What a probe of one core type found.
struct BlasProbe {
  std::string core_type;  // "": OpenBLAS's own choice
  bool correct = false;
  double gigaflops = 0;  // of processor time; 0: correct, but not measured
};

// The first correct one (they come best first); a later one only when it is at least four times as
// fast. So the choice is a property of the machine and not of its load: ranks of one job, and a job
// that resumes, get the same bits. "" when none is correct.
std::string PickBlasCoreType(const std::vector<BlasProbe>& probes);

// PickBlasCoreType among SKYLAKEX and HASWELL, where the CPU has their instructions, and the
// default, each tried in a child process of this program; the set one when the variable is set.
// Takes about 0.3 s. REQUIRES: main called MaybeRunBlasProbe.
std::string ChooseBlasCoreType();

// Sets OPENBLAS_CORETYPE to the choice and OPENBLAS_NUM_THREADS to 1 and re-executes the program
// with argv when that changes anything. Returns when the process already runs with both (or
// re-execution failed).
void EnsureBlasCoreType(char** argv);

}  // namespace octavo
