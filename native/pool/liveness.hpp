// A process is alive while it holds its byte lock on the segment's file. Right across pid namespaces, for
// zombies (their files are closed) and for restarts; nothing here looks at pids.
#pragma once

#include "pool/base.hpp"

namespace umbp {

// Takes the byte of `slot` for this process; false if another process has it.
bool take_byte_lock(int fd, u32 slot);
// Whether another process holds the byte. A process never sees its own lock as held.
bool other_holds_byte_lock(int fd, u32 slot);

}  // namespace umbp
