// Profiles of a running job: the table of operations with a mark before and after every call.
//
//   OpProfiler profiler(backend);
//   backend.ops = profiler.ops();                 // before the model is built
//   profiler.Begin({.id = 7, .steps = 3}, step, model.executed());
//   … three times: profiler.BeginStep(); the step; profiler.EndStep(model.executed()) …
//   if (profiler.done()) { Send(profiler.Take()); }
//
// Marks are events of the compute lane (or, on the CPU, the clock), so the host never waits for
// the device within a step; it does once behind each profiled step. A collective that was started
// to run beside computing is marked on its own lane and does not count towards the step's time;
// what computing waited for it does ("wait_for_messages"). Where a call belongs comes from
// the ranges that layers push (decoder.cc, linear.cc): "forward", "layer 3", "fc1". Outside a
// profile a call costs one more load and a branch.
//
// One profiler per training thread: the thread that made it is the one whose calls it times; calls
// of other threads pass through. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/ops.h"
#include "octavo/v1/profile.pb.h"
#include "worker/precision/executed.h"
#include "worker/rank/op_work.h"
#include "worker/rank/training_host.h"

namespace octavo {

class OpProfiler {
 public:
  // The backend outlives the profiler.
  explicit OpProfiler(const Backend& backend);
  ~OpProfiler();
  OpProfiler(const OpProfiler&) = delete;
  OpProfiler& operator=(const OpProfiler&) = delete;

  // The table to train with; lives as long as the profiler.
  const Ops* ops() const { return &table_; }

  // A profile of the next request.steps steps, the first of which is `first_step` (1-based).
  void Begin(const ProfileRequest& request, std::int64_t first_step,
             const ExecutedCounters& executed);
  bool active() const { return profile_.steps() > steps_done_; }
  void BeginStep();
  void EndStep(const ExecutedCounters& executed);
  // Every step is timed, or could not be (error).
  bool done() const { return done_; }
  v1::RankProfile Take();

  // A part of a step that is not an operation of the table: a collective.
  class Section {
   public:
    // lane: kCompute, or kComm for one that only starts.
    Section(const char* op, double bytes, Lane lane = Lane::kCompute);
    ~Section();
    Section(const Section&) = delete;
    Section& operator=(const Section&) = delete;

   private:
    OpProfiler* const profiler_;
  };

  // For the wrappers.
  void Before(const char* op, const OpWork& work, Lane lane = Lane::kCompute);
  void After();
  void Push(const char* range);
  void Pop();
  bool timing() const { return timing_; }

 private:
  struct Call {
    const char* op;
    std::int32_t place;  // of places_
    OpWork work;
    Lane lane;
  };
  // phase, layer, site, op, beside
  using Key = std::tuple<std::string, std::string, std::string, std::string, bool>;

  std::int32_t Place();

  const Backend backend_;
  const Ops table_;
  bool timing_ = false;  // within a profiled step
  bool open_ = false;    // a call has its first mark only
  bool done_ = false;
  std::int32_t steps_done_ = 0;
  double step_begin_ = 0;
  v1::RankProfile profile_;
  std::vector<ExecutedEntry> executed_before_;
  std::vector<const char*> ranges_;
  bool range_changed_ = true;
  std::int32_t place_ = 0;
  std::vector<std::vector<std::string>> places_;
  std::vector<Call> calls_;  // of this step
  std::map<Key, v1::ProfileEntry> entries_;
};

}  // namespace octavo
