// SPDX-License-Identifier: Apache-2.0
#include "core/torch_snapshot.h"

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/pickle_bytes.h"
#include "core/snapshot_builder.h"

namespace opacus_memprof {
namespace {

constexpr std::size_t kDeepest = std::size_t{1} << 20U;  // values on the stack; Python writes 1000

// Executes the opcodes of Python's pickle.py that build numbers, strings, lists, tuples and dicts.
class Unpickler {
 public:
  explicit Unpickler(const std::string& path) : bytes_(path) {}

  TorchSnapshot read() {
    if (bytes_.next() != 0x80) refuse("it does not begin as a pickle does");
    if (const unsigned version = bytes_.next(); version < 2 || version > 5) {
      refuse("version " + std::to_string(version) + " of pickles is not known");
    }
    for (std::uint8_t code = bytes_.next(); code != '.'; code = bytes_.next()) {
      if (!push_constant(code) && !use_stack(code)) refuse_code(code);
      if (stack_.size() > kDeepest) refuse("it is nested deeper than a snapshot");
      // On average, an object of a snapshot takes more than eight bytes, and a segment with its
      // list of blocks more than 64.
      const std::uint64_t most = 1024 + bytes_.position() / 8;
      if (memo_.size() > most || builder_.objects() > most || builder_.lists() > most / 8) {
        refuse("it holds more objects than a snapshot");
      }
    }
    return builder_.finish();
  }

 private:
  [[noreturn]] static void refuse_code(std::uint8_t code) {
    // GLOBAL, STACK_GLOBAL, REDUCE, BUILD, INST, OBJ, NEWOBJ, NEWOBJ_EX, EXT and PERSID.
    if (std::string_view("c\x93Rbio\x81\x92\x82\x83\x84PQ").find(static_cast<char>(code)) !=
        std::string_view::npos) {
      refuse("it asks Python to import or call something, which no snapshot does");
    }
    refuse("it has a value that no snapshot has (opcode " + std::to_string(code) + ")");
  }

  // Returns whether this is the opcode of a constant.
  bool push_constant(std::uint8_t code) {
    switch (code) {
      case 'N':
      case ')':
        return push({});
      case 'G':  // a double
        bytes_.number(8);
        return push({Kind::fraction});
      case 0x88:
        return push({Kind::number, 1});
      case 0x89:
        return push({Kind::number, 0});
      case 'K':
        return push({Kind::number, bytes_.number(1)});
      case 'M':
        return push({Kind::number, bytes_.number(2)});
      case 'J': {
        const auto number = static_cast<std::int32_t>(bytes_.number(4));
        return push({Kind::number, static_cast<std::uint64_t>(std::int64_t{number})});
      }
      case 0x8a:
        return push_long(bytes_.next());
      case 0x8c:
        return push_string(bytes_.number(1));
      case 'X':
        return push_string(bytes_.number(4));
      case 0x8d:
        return push_string(bytes_.number(8));
      case '}':
        return push({Kind::object, builder_.add_object(Type::dict)});
      case ']':
        return push({Kind::object, builder_.add_object(Type::list)});
      case '(':
        return push({Kind::mark});
      default:
        return false;
    }
  }

  // Returns whether this is an opcode that uses what was pushed before.
  bool use_stack(std::uint8_t code) {
    switch (code) {
      case 0x95:  // FRAME
        bytes_.number(8);
        return true;
      case 'h':
        return push(remembered(bytes_.number(1)));
      case 'j':
        return push(remembered(bytes_.number(4)));
      case 0x94:
        return remember(memo_.size());
      case 'q':
        return remember(bytes_.number(1));
      case 'r':
        return remember(bytes_.number(4));
      case 0x85:
      case 0x86:
      case 0x87:
        return push_tuple(stack_.size() - (code - 0x84U));
      case 't':
        return push_tuple(pop_mark());
      case 'a':
        return append(stack_.size() - 1);
      case 'e':
        return append(pop_mark());
      case 's':
        return set_items(stack_.size() - 2);
      case 'u':
        return set_items(pop_mark());
      default:
        return false;
    }
  }

  bool push(PickleValue value) {
    stack_.push_back(value);
    return true;
  }
  bool push_long(std::uint8_t size) {
    std::uint64_t number = 0;
    bool fits = true;
    for (unsigned i = 0; i < size; ++i) {
      const std::uint64_t byte = bytes_.next();
      if (i < 8) {
        number |= byte << 8U * i;
      } else {
        fits = fits && byte == 0;
      }
    }
    return push({fits ? Kind::number : Kind::fraction, number});
  }
  bool push_string(std::uint64_t size) {
    return push({Kind::string, builder_.intern(bytes_.text(size))});
  }
  // Of tuples, snapshots have only the ids of pools.
  bool push_tuple(std::size_t first) {
    if (first > stack_.size()) refuse_values();
    stack_.resize(first);
    return push({});
  }

  bool remember(std::uint64_t place) {
    if (stack_.empty() || place > memo_.size()) refuse_values();
    if (place == memo_.size()) memo_.emplace_back();
    memo_[place] = stack_.back();
    return true;
  }
  [[nodiscard]] PickleValue remembered(std::uint64_t place) const {
    if (place >= memo_.size()) refuse_values();
    return memo_[place];
  }

  // Removes the last mark. Returns the index of the first value after it.
  std::size_t pop_mark() {
    std::size_t place = stack_.size();
    while (place > 0 && stack_[place - 1].kind != Kind::mark) --place;
    if (place == 0) refuse_values();
    stack_.erase(stack_.begin() + static_cast<std::ptrdiff_t>(place) - 1);
    return place - 1;
  }
  // The object below the values from `first` on.
  [[nodiscard]] std::uint64_t target(std::size_t first) const {
    if (first == 0 || first > stack_.size() || stack_[first - 1].kind != Kind::object) {
      refuse_values();
    }
    return stack_[first - 1].data;
  }
  bool append(std::size_t first) {
    builder_.append(target(first), std::span(stack_).subspan(first));
    stack_.resize(first);
    return true;
  }
  bool set_items(std::size_t first) {
    builder_.set_items(target(first), std::span(stack_).subspan(first));
    stack_.resize(first);
    return true;
  }

  PickleBytes bytes_;
  SnapshotBuilder builder_;
  std::vector<PickleValue> stack_;
  std::vector<PickleValue> memo_;
};

}  // namespace

TorchSnapshot read_torch_snapshot(const std::string& path) { return Unpickler(path).read(); }

}  // namespace opacus_memprof
