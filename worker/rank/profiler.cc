#include "worker/rank/profiler.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "kernels/ops_list.h"
#include "proto/precision/recipe.h"

namespace octavo {
namespace {

// Calls of one step that can be timed: two marks each. A step of configuration A has about 2000.
constexpr std::int32_t kCallsMax = 16384;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Functions of the table have no state argument. Timed calls come from the thread that made the
// profiler; calls of others (a checkpoint's writer) find the real table through `last_inner`.
thread_local OpProfiler* current = nullptr;
thread_local const Ops* inner = nullptr;
std::atomic<const Ops*> last_inner{nullptr};

const Ops* Inner() { return inner != nullptr ? inner : last_inner.load(std::memory_order_acquire); }

OpWork WorkOf(const OpWork& known) { return known; }

template <class Args, class Call>
void Timed(const char* op, const Args& args, const Call& call) {
  OpProfiler* const profiler = current;
  if (profiler == nullptr || !profiler->timing()) {
    call();
    return;
  }
  profiler->Before(op, WorkOf(args));
  call();
  profiler->After();
}

Ops Wrap(const Ops& real) {
  Ops table = real;
  table.copy = [](OpsContext* c, const CopyArgs& args) {
    Timed("copy", args, [&] { Inner()->copy(c, args); });
  };
  table.zero = [](OpsContext* c, void* data, std::int64_t bytes) {
    Timed("zero", OpWork{.bytes = static_cast<double>(bytes)},
          [&] { Inner()->zero(c, data, bytes); });
  };
  table.stats_reset = [](OpsContext* c, StatSlot* slots, std::int64_t count) {
    Timed("stats_reset", OpWork{.bytes = static_cast<double>(count * 64)},
          [&] { Inner()->stats_reset(c, slots, count); });
  };
  table.range_push = [](OpsContext* c, const char* name) {
    if (current != nullptr) {
      current->Push(name);
    }
    Inner()->range_push(c, name);
  };
  table.range_pop = [](OpsContext* c) {
    if (current != nullptr) {
      current->Pop();
    }
    Inner()->range_pop(c);
  };
#define OCTAVO_TIMED(field, Name, Args)                    \
  table.field = [](OpsContext* c, const Args& args) {      \
    Timed(#field, args, [&] { Inner()->field(c, args); }); \
  };
  OCTAVO_COMPUTE_OPS(OCTAVO_TIMED)
#undef OCTAVO_TIMED
  return table;
}

}  // namespace

OpProfiler::OpProfiler(const Backend& backend) : backend_(backend), table_(Wrap(*backend.ops)) {
  OCTAVO_CHECK(current == nullptr, "this thread has a profiler already");
  current = this;
  inner = backend.ops;
  last_inner.store(backend.ops, std::memory_order_release);
}

OpProfiler::~OpProfiler() {
  current = nullptr;
  inner = nullptr;
}

void OpProfiler::Begin(const ProfileRequest& request, std::int64_t first_step,
                       const ExecutedCounters& executed) {
  profile_.Clear();
  profile_.set_id(request.id);
  profile_.set_first_step(first_step);
  profile_.set_steps(request.steps);
  profile_.set_backend(backend_.ops->name);
  entries_.clear();
  places_.clear();
  range_changed_ = true;
  steps_done_ = 0;
  done_ = false;
  executed_before_ = executed.entries();
  calls_.clear();
  calls_.reserve(kCallsMax);
  if (backend_.ops->reserve_marks(backend_.context, 2 * kCallsMax) != 0) {
    profile_.set_steps(0);
    profile_.set_error("no room for the marks of a step on the device");
    done_ = true;
  }
}

void OpProfiler::BeginStep() {
  calls_.clear();
  timing_ = true;
  step_begin_ = Now();
}

void OpProfiler::EndStep(const ExecutedCounters& executed) {
  timing_ = false;
  // Behind the step, which waits for whatever it started.
  backend_.ops->synchronize(backend_.context);
  backend_.ops->synchronize_lane(backend_.context, Lane::kComm);
  profile_.set_seconds(profile_.seconds() + Now() - step_begin_);
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    const Call& call = calls_[i];
    const auto mark = static_cast<std::int32_t>(2 * i);
    const std::vector<std::string>& place = places_[static_cast<std::size_t>(call.place)];
    v1::ProfileEntry& entry =
        entries_[{place[0], place[1], place[2], call.op, call.lane != Lane::kCompute}];
    entry.set_calls(entry.calls() + 1);
    entry.set_seconds(entry.seconds() +
                      backend_.ops->mark_seconds(backend_.context, mark, mark + 1));
    entry.set_bytes(entry.bytes() + call.work.bytes);
    entry.set_flops(entry.flops() + call.work.flops);
  }
  if (++steps_done_ < profile_.steps()) {
    return;
  }
  done_ = true;
  for (auto& [key, entry] : entries_) {
    v1::ProfileEntry& out = *profile_.add_entries();
    out = std::move(entry);
    bool beside = false;
    std::tie(*out.mutable_phase(), *out.mutable_layer(), *out.mutable_site(), *out.mutable_op(),
             beside) = key;
    out.set_beside(beside);
  }
  for (const ExecutedEntry& now : executed.entries()) {
    const auto before =
        std::find_if(executed_before_.begin(), executed_before_.end(), [&](const ExecutedEntry& e) {
          return e.site.layer == now.site.layer && e.site.op == now.site.op &&
                 e.planned == now.planned && e.executed == now.executed && e.reason == now.reason;
        });
    const bool known = before != executed_before_.end();
    const std::int64_t calls = now.calls - (known ? before->calls : 0);
    if (calls == 0) {
      continue;
    }
    v1::ProfilePrecision& out = *profile_.add_precision();
    out.set_layer(now.site.layer);
    out.set_op(std::string(Name(now.site.op)));
    out.set_planned(DebugString(now.planned));
    out.set_executed(DebugString(now.executed));
    out.set_reason(now.reason);
    out.set_calls(calls);
    out.set_flops(now.flops - (known ? before->flops : 0));
  }
}

v1::RankProfile OpProfiler::Take() {
  done_ = false;
  steps_done_ = 0;
  entries_.clear();
  return std::exchange(profile_, v1::RankProfile());
}

void OpProfiler::Push(const char* range) {
  ranges_.push_back(range);
  range_changed_ = true;
}

void OpProfiler::Pop() {
  OCTAVO_CHECK(!ranges_.empty(), "more ranges end than begin");
  ranges_.pop_back();
  range_changed_ = true;
}

// phase, layer, site from the ranges that are open: "layer …" is a layer, what is outside of it the
// phase, what is inside the site.
std::int32_t OpProfiler::Place() {
  if (!range_changed_ && !places_.empty()) {
    return place_;
  }
  range_changed_ = false;
  std::vector<std::string> place(3);
  for (const char* range : ranges_) {
    const std::string_view text = range;
    place[text.substr(0, 6) == "layer " ? 1 : range == ranges_.front() ? 0 : 2] = text;
  }
  const auto known = std::find(places_.begin(), places_.end(), place);
  place_ = static_cast<std::int32_t>(known - places_.begin());
  if (known == places_.end()) {
    places_.push_back(std::move(place));
  }
  return place_;
}

void OpProfiler::Before(const char* op, const OpWork& work, Lane lane) {
  if (calls_.size() >= kCallsMax) {
    profile_.set_untimed_calls(profile_.untimed_calls() + 1);
    return;
  }
  open_ = true;
  calls_.push_back({.op = op, .place = Place(), .work = work, .lane = lane});
  if (lane != Lane::kCompute) {
    // The call begins after what computing holds now; its first mark must too.
    backend_.ops->order(backend_.context, Lane::kCompute, lane);
  }
  backend_.ops->mark(backend_.context, static_cast<std::int32_t>(2 * calls_.size() - 2), lane);
}

void OpProfiler::After() {
  if (std::exchange(open_, false)) {
    backend_.ops->mark(backend_.context, static_cast<std::int32_t>(2 * calls_.size() - 1),
                       calls_.back().lane);
  }
}

OpProfiler::Section::Section(const char* op, double bytes, Lane lane)
    : profiler_(current != nullptr && current->timing() ? current : nullptr) {
  if (profiler_ != nullptr) {
    profiler_->Before(op, {.bytes = bytes}, lane);
  }
}

OpProfiler::Section::~Section() {
  if (profiler_ != nullptr) {
    profiler_->After();
  }
}

}  // namespace octavo
