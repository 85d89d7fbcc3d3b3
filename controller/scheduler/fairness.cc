#include "controller/scheduler/fairness.h"

#include <algorithm>
#include <numeric>

namespace octavo {

bool GoesBefore(const QueueKey& a, const QueueKey& b) {
  if (a.priority != b.priority) {
    return a.priority > b.priority;
  }
  if (a.submit_micros != b.submit_micros) {
    return a.submit_micros < b.submit_micros;
  }
  return a.uid < b.uid;
}

std::vector<std::size_t> QueueOrder(const std::vector<QueueKey>& keys) {
  std::vector<std::size_t> order(keys.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&keys](std::size_t a, std::size_t b) { return GoesBefore(keys[a], keys[b]); });
  return order;
}

}  // namespace octavo
