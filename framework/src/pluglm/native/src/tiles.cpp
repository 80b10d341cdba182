#include "tiles.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pluglm {

#if defined(__AMX_BF16__) && defined(__linux__)

bool allow_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return allowed;
}

#else

bool allow_tiles() { return false; }

#endif

}  // namespace pluglm
