// ThreadSanitizer does not see the locks of Debian's Abseil, which is not instrumented: what they
// guard would be reported as racing. In that build these definitions come before the library's and
// say what they do. A wait polls: the library would evaluate its condition on either thread.
#if defined(__SANITIZE_THREAD__)

#include <dlfcn.h>
#include <poll.h>
#include <sanitizer/tsan_interface.h>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/check.h"

namespace {

template <class Object>
using Function = void (*)(Object*);

template <class Object>
Function<Object> Original(const char* symbol) {
  void* found = ::dlsym(RTLD_NEXT, symbol);
  OCTAVO_CHECK(found != nullptr, "%s is in no library: another Abseil?", symbol);
  return reinterpret_cast<Function<Object>>(found);
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  static const auto original = Original<Mutex>("_ZN4absl7debian35Mutex4LockEv");
  original(this);
  __tsan_acquire(this);
}

void Mutex::Unlock() {
  static const auto original = Original<Mutex>("_ZN4absl7debian35Mutex6UnlockEv");
  __tsan_release(this);
  original(this);
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  while (!condition.Eval()) {
    if (Now() >= deadline) {
      return false;
    }
    Unlock();
    ::poll(nullptr, 0, /*timeout=*/1);
    Lock();
  }
  return true;
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  return AwaitWithDeadline(condition, Now() + timeout);
}

void Notification::Notify() {
  static const auto original = Original<Notification>("_ZN4absl7debian312Notification6NotifyEv");
  __tsan_release(this);
  original(this);
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  const Time deadline = Now() + timeout;
  while (!HasBeenNotified()) {
    if (Now() >= deadline) {
      return false;
    }
    ::poll(nullptr, 0, /*timeout=*/1);
  }
  __tsan_acquire(const_cast<Notification*>(this));
  return true;
}

ABSL_NAMESPACE_END
}  // namespace absl

#endif  // __SANITIZE_THREAD__
