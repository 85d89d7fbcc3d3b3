// The communicator of a group of one: every collective is a copy or nothing.
#pragma once

#include <memory>

#include "worker/comm/communicator.h"

namespace octavo {

// Never fails until Abort, after which every call returns kFault.
std::unique_ptr<Communicator> CreateSelfCommunicator();

}  // namespace octavo
