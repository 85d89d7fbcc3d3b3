// Two hosts on one machine: network namespaces with their own addresses and no shared loopback.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "tests/system/temp_cluster.h"

namespace octavo {
namespace {

int Sh(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()); }

// A bridge in our namespace with one veth pair per host.
class Hosts {
 public:
  explicit Hosts(int count) {
    const std::string tag = std::to_string(getpid() % 10000);
    bridge_ = "ob" + tag;
    subnet_ = "10." + std::to_string(100 + getpid() % 100) + ".7.";
    ok_ = Sh("ip link add " + bridge_ + " type bridge") == 0 &&
          Sh("ip addr add " + subnet_ + "1/24 dev " + bridge_) == 0 &&
          Sh("ip link set " + bridge_ + " up") == 0;
    for (int i = 0; ok_ && i < count; ++i) {
      const std::string ns = "oct" + tag + "h" + std::to_string(i);
      const std::string a = "oa" + tag + std::to_string(i), b = "oc" + tag + std::to_string(i);
      ok_ = Sh("ip netns add " + ns) == 0 &&
            Sh("ip link add " + a + " type veth peer name " + b) == 0 &&
            Sh("ip link set " + b + " netns " + ns) == 0 &&
            Sh("ip link set " + a + " master " + bridge_ + " up") == 0 &&
            Sh("ip -n " + ns + " addr add " + address(i) + "/24 dev " + b) == 0 &&
            Sh("ip -n " + ns + " link set " + b + " up") == 0 &&
            Sh("ip -n " + ns + " link set lo up") == 0;
      names_.push_back(ns);
      uplinks_.push_back(a);
    }
  }
  ~Hosts() {
    for (const std::string& ns : names_) {
      Sh("ip netns pids " + ns + " | xargs -r kill -9");
      Sh("ip netns del " + ns);
    }
    Sh("ip link del " + bridge_);
  }
  bool ok() const { return ok_; }
  const std::vector<std::string>& names() const { return names_; }
  std::string address(int i) const { return subnet_ + std::to_string(10 + i); }
  std::string controller() const { return subnet_ + "1"; }
  // Pulls the cable and ends every process of the host.
  void Destroy(int i) {
    Sh("ip link set " + uplinks_[static_cast<std::size_t>(i)] + " down");
    Sh("ip netns pids " + names_[static_cast<std::size_t>(i)] + " | xargs -r kill -9");
  }

 private:
  bool ok_ = false;
  std::string bridge_, subnet_;
  std::vector<std::string> names_, uplinks_;
};

TEST(Namespaces, OneJobOverTwoHostsThenAHostDiesAndTheJobRestartsAndEnds) {
  Hosts hosts(3);
  if (!hosts.ok()) {
    GTEST_SKIP() << "network namespaces are not to be had here (needs root and iproute2)";
  }
  TempCluster cluster({.workers = 3,
                       .namespaces = hosts.names(),
                       .advertise_addresses = {hosts.address(0), hosts.address(1), hosts.address(2)},
                       .controller_address = hosts.controller()});
  cluster.Submit(cluster.Spec({.steps = 120, .recipe = "fp8_flow"}));
  const v1::Job running = cluster.WaitFor(
      "test", [](const v1::Job& j) { return j.progress().checkpoint_step() >= 10; },
      "the checkpoint of step 10");
  ASSERT_EQ(running.attempts_size(), 1) << running.message();
  ASSERT_NE(running.attempts(0).placements(0).worker(), running.attempts(0).placements(1).worker());
  const std::string victim = running.attempts(0).placements(1).worker();
  hosts.Destroy(victim.back() - '0');
  cluster.worker(victim.back() - '0').reset();  // it is gone with its host
  const v1::Job job = cluster.WaitForEnd("test");
  EXPECT_EQ(job.state(), v1::SUCCEEDED) << job.message();
  EXPECT_GE(job.attempts_size(), 2);
  EXPECT_GE(job.attempts(job.attempts_size() - 1).loaded_checkpoint_step(), 10);
}

}  // namespace
}  // namespace octavo
