// OCTAVO_CHECK: our own errors (a broken invariant) end the process with file, line and values.
//
//   OCTAVO_CHECK(rows >= 0);
//   OCTAVO_CHECK(cols % 128 == 0, "cols = %lld must be a multiple of the tile", cols);
//   OCTAVO_CHECK_EQ(payload.size(), rows * cols);
//   OCTAVO_DCHECK(...)          only where NDEBUG is not defined
//
// The world's errors (files, peers, user input) are absl::Status instead; see base/status.h.
// Header only and free of absl, so that kernels and nvcc may include it. A message never contains
// unevaluated user formats: the format string is a literal checked by the compiler.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

namespace octavo::check_internal {

[[noreturn]] inline void FailPlain(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, condition);
  std::fflush(stderr);
  std::abort();
}

[[noreturn]] [[gnu::format(printf, 4, 5)]] inline void Fail(const char* file, int line,
                                                            const char* condition,
                                                            const char* format, ...) {
  std::fprintf(stderr, "%s:%d: check failed: %s: ", file, line, condition);
  va_list args;
  va_start(args, format);
  std::vfprintf(stderr, format, args);
  va_end(args);
  std::fputc('\n', stderr);
  std::fflush(stderr);
  std::abort();
}

template <class A, class B>
[[noreturn]] inline void FailCompare(const char* file, int line, const char* condition, const A& a,
                                     const B& b) {
  std::ostringstream text;
  text << a << " vs " << b;
  Fail(file, line, condition, "%s", text.str().c_str());
}

}  // namespace octavo::check_internal

#define OCTAVO_CHECK(condition, ...)                                     \
  do {                                                                   \
    if (__builtin_expect(!(condition), 0)) {                             \
      OCTAVO_CHECK_INTERNAL_FAIL(#condition __VA_OPT__(, ) __VA_ARGS__); \
    }                                                                    \
  } while (false)

// Chooses the plain form when there is no message, so that the compiler checks real formats.
#define OCTAVO_CHECK_INTERNAL_FAIL(text, ...) \
  OCTAVO_CHECK_INTERNAL_PICK(__VA_OPT__(1))(text __VA_OPT__(, ) __VA_ARGS__)
#define OCTAVO_CHECK_INTERNAL_PICK(has_message) OCTAVO_CHECK_INTERNAL_CAT(has_message)
#define OCTAVO_CHECK_INTERNAL_CAT(has_message) OCTAVO_CHECK_INTERNAL_FORM_##has_message
#define OCTAVO_CHECK_INTERNAL_FORM_(text) \
  ::octavo::check_internal::FailPlain(__FILE__, __LINE__, text)
#define OCTAVO_CHECK_INTERNAL_FORM_1(text, ...) \
  ::octavo::check_internal::Fail(__FILE__, __LINE__, text, __VA_ARGS__)

#define OCTAVO_CHECK_INTERNAL_COMPARE(a, op, b)                                                    \
  do {                                                                                             \
    const auto& octavo_check_a = (a);                                                              \
    const auto& octavo_check_b = (b);                                                              \
    if (__builtin_expect(!(octavo_check_a op octavo_check_b), 0)) {                                \
      ::octavo::check_internal::FailCompare(__FILE__, __LINE__, #a " " #op " " #b, octavo_check_a, \
                                            octavo_check_b);                                       \
    }                                                                                              \
  } while (false)

#define OCTAVO_CHECK_EQ(a, b) OCTAVO_CHECK_INTERNAL_COMPARE(a, ==, b)
#define OCTAVO_CHECK_NE(a, b) OCTAVO_CHECK_INTERNAL_COMPARE(a, !=, b)
#define OCTAVO_CHECK_LT(a, b) OCTAVO_CHECK_INTERNAL_COMPARE(a, <, b)
#define OCTAVO_CHECK_LE(a, b) OCTAVO_CHECK_INTERNAL_COMPARE(a, <=, b)
#define OCTAVO_CHECK_GT(a, b) OCTAVO_CHECK_INTERNAL_COMPARE(a, >, b)
#define OCTAVO_CHECK_GE(a, b) OCTAVO_CHECK_INTERNAL_COMPARE(a, >=, b)

#ifdef NDEBUG
// The condition is still compiled (so that it cannot rot) but never evaluated.
#define OCTAVO_DCHECK(condition, ...)                     \
  do {                                                    \
    if (false) {                                          \
      OCTAVO_CHECK(condition __VA_OPT__(, ) __VA_ARGS__); \
    }                                                     \
  } while (false)
#else
#define OCTAVO_DCHECK(condition, ...) OCTAVO_CHECK(condition __VA_OPT__(, ) __VA_ARGS__)
#endif
