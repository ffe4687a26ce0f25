// Compiled once for each instruction set: DLION_PATH is its name, DLION_LANES the width of its vectors in 32-bit lanes.
#include "apply.h"
#include "ballot.h"
#include "hash.h"
#include "tally.h"

#define DLION_TEXT(name) #name
#define DLION_NAME(name) DLION_TEXT(name)

namespace dlion {

extern const Path DLION_PATH{DLION_NAME(DLION_PATH), &::ballot, &::apply, &::tally, &::hash};

}  // namespace dlion
