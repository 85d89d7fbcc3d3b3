#include "tests/unit/worker/agent/fake_rank.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "base/str.h"
#include "grpcpp/grpcpp.h"
#include "octavo/internal/v1/rank_service.grpc.pb.h"

namespace octavo {
namespace {

namespace iv1 = internal::v1;

class FakeRank {
 public:
  FakeRank(const std::string& socket, std::string uid, int attempt, int rank)
      : uid_(std::move(uid)),
        attempt_(attempt),
        rank_(rank),
        stub_(iv1::RankService::NewStub(
            grpc::CreateChannel(socket, grpc::InsecureChannelCredentials()))),
        stream_(stub_->Session(&context_)) {}

  int Run() {
    iv1::RankToWorker hello;
    hello.mutable_hello()->set_pid(::getpid());
    Send(hello);
    iv1::WorkerToRank first;
    if (!stream_->Read(&first) || !first.has_assignment()) {
      std::fprintf(stderr, "no assignment\n");
      return 4;
    }
    std::fprintf(stderr, "assignment of %s\n", first.assignment().job_name().c_str());
    const std::jthread reader([this] { ReadLoop(); });
    const int code = Behave();
    stream_->WritesDone();  // the worker then ends the stream, which ends the reader
    return code;
  }

 private:
  int Behave() {
    if (StartsWith(uid_, "crash")) {
      std::fprintf(stderr, "about to crash\n");
      std::fflush(stderr);
      std::abort();
    }
    if (StartsWith(uid_, "stubborn")) {
      ::signal(SIGTERM, SIG_IGN);
      iv1::RankToWorker progress;
      progress.mutable_progress()->set_phase(iv1::RANK_TRAINING);
      Send(progress);
      while (true) {
        ::pause();
      }
    }
    if (StartsWith(uid_, "meet")) {
      return Meet();
    }
    const bool finish = StartsWith(uid_, "finish");
    for (int step = 1; !finish || step <= 3; ++step) {
      iv1::RankToWorker report;
      report.mutable_step()->set_step(step);
      report.mutable_step()->set_tokens(64);
      report.mutable_step()->set_loss(1.0 / step);
      Send(report);
      std::unique_lock<std::mutex> lock(mutex_);
      if (!finish &&
          changed_.wait_for(lock, std::chrono::milliseconds(5), [this] { return stop_; })) {
        lock.unlock();
        iv1::RankToWorker saved;
        saved.mutable_checkpoint()->set_step(step);
        saved.mutable_checkpoint()->set_ok(true);
        Send(saved);
        LastWord("stopped as wished", step, /*stopped=*/true);
        return 0;
      }
    }
    LastWord("finished", 3, /*stopped=*/false);
    return 0;
  }

  int Meet() {
    iv1::RankToWorker set;
    set.mutable_kv()->set_id(1);
    set.mutable_kv()->mutable_set()->set_key(StrCat("rank", rank_));
    set.mutable_kv()->mutable_set()->set_value(StrCat("address-of-", rank_));
    Send(set);
    iv1::RankToWorker get;
    get.mutable_kv()->set_id(2);
    get.mutable_kv()->mutable_get()->set_key(StrCat("rank", 1 - rank_));
    get.mutable_kv()->mutable_get()->set_timeout_ms(30000);
    Send(get);
    std::unique_lock<std::mutex> lock(mutex_);
    const bool answered = changed_.wait_for(lock, std::chrono::seconds(40),
                                            [this] { return replies_.count(2) != 0; });
    const std::string value = answered ? replies_[2].value() + replies_[2].error() : "no answer";
    lock.unlock();
    LastWord(value, 0, false);
    return 0;
  }

  void LastWord(const std::string& text, std::int64_t step, bool stopped) {
    iv1::RankToWorker message;
    message.mutable_outcome()->set_message(text);
    message.mutable_outcome()->set_step(step);
    message.mutable_outcome()->set_stopped(stopped);
    Send(message);
  }

  void Send(iv1::RankToWorker message) {
    message.set_job_uid(uid_);
    message.set_attempt(attempt_);
    message.set_rank(rank_);
    if (!stream_->Write(message)) {
      std::fprintf(stderr, "the worker is gone\n");
      std::_Exit(5);
    }
  }

  void ReadLoop() {
    iv1::WorkerToRank message;
    while (stream_->Read(&message)) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (message.has_wishes()) {
          stop_ = stop_ || message.wishes().stop();
        } else if (message.has_kv()) {
          replies_[message.kv().id()] = message.kv();
        }
      }
      changed_.notify_all();
    }
  }

  const std::string uid_;
  const int attempt_;
  const int rank_;
  grpc::ClientContext context_;
  std::unique_ptr<iv1::RankService::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<iv1::RankToWorker, iv1::WorkerToRank>> stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;                                   // guarded by mutex_
  std::map<std::int64_t, iv1::KeyValueReply> replies_;  // guarded by mutex_
};

}  // namespace

int FakeRankMain(int argc, char** argv) {
  std::map<std::string_view, std::string> flags;
  for (int i = 1; i + 1 < argc; i += 2) {
    flags[argv[i]] = argv[i + 1];
  }
  FakeRank rank(flags["--socket"], flags["--job-uid"], std::atoi(flags["--attempt"].c_str()),
                std::atoi(flags["--rank"].c_str()));
  return rank.Run();
}

}  // namespace octavo
