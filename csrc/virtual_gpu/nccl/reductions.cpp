// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/nccl/reductions.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <type_traits>

namespace opacus_memprof::virtual_gpu {
namespace {

// The 16-bit floats as NCCL computes with them: in 32 bits, rounded to the nearest even.
struct Bfloat16 {
  std::uint16_t bits;
  explicit operator double() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
  }
  static Bfloat16 from(double value) {
    const auto whole = std::bit_cast<std::uint32_t>(static_cast<float>(value));
    if (std::isnan(value)) {
      return {static_cast<std::uint16_t>((whole >> 16U) | 0x40U)};
    }
    return {static_cast<std::uint16_t>((whole + 0x7FFFU + ((whole >> 16U) & 1U)) >> 16U)};
  }
};

struct Float16 {
  std::uint16_t bits;
  explicit operator double() const {
    const double sign = (bits & 0x8000U) != 0 ? -1 : 1;
    const int exponent = (bits >> 10U) & 0x1FU;
    const int mantissa = bits & 0x3FFU;
    if (exponent == 31) {
      return mantissa == 0 ? sign * INFINITY : NAN;
    }
    return sign *
           (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
  }
  static Float16 from(double value) {
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000U : 0U);
    const double size = std::abs(value);
    if (std::isnan(value)) {
      return {static_cast<std::uint16_t>(sign | 0x7E00U)};
    }
    if (size >= 65520) {  // halfway between the largest and what would follow
      return {static_cast<std::uint16_t>(sign | 0x7C00U)};
    }
    // In units of the last place at its exponent, where what rounds up to a power of two carries
    // over.
    int exponent = 0;
    std::frexp(size, &exponent);
    const int shift = size < std::ldexp(1, -14) ? 0 : exponent + 13;
    const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(size, 24 - shift)));
    return {
        static_cast<std::uint16_t>(sign | (units + (static_cast<std::uint32_t>(shift) << 10U)))};
  }
};

struct ScaledSum {
  const void* scalar = nullptr;  // on the device; nullptr where `factor` has it
  double factor = 1;
  ncclDataType_t type = ncclFloat32;
};

struct Scaled {
  std::mutex mutex;
  std::map<int, ScaledSum> sums;
};

Scaled& scaled() {
  static auto* const only = new Scaled;
  return *only;
}

template <class T>
T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Calls `visit` with a value of the type; false where it is none that is computed with.
template <class Visit>
bool dispatch(ncclDataType_t type, Visit visit) {
  switch (type) {
    case ncclInt8:
      return visit(std::int8_t{}), true;
    case ncclUint8:
      return visit(std::uint8_t{}), true;
    case ncclInt32:
      return visit(std::int32_t{}), true;
    case ncclUint32:
      return visit(std::uint32_t{}), true;
    case ncclInt64:
      return visit(std::int64_t{}), true;
    case ncclUint64:
      return visit(std::uint64_t{}), true;
    case ncclFloat16:
      return visit(Float16{}), true;
    case ncclFloat32:
      return visit(float{}), true;
    case ncclFloat64:
      return visit(double{}), true;
    case ncclBfloat16:
      return visit(Bfloat16{}), true;
    default:
      return false;
  }
}

template <class T>
T power(T value, int exponent) {
  T result = 1;
  for (; exponent > 0; --exponent) {
    result = static_cast<T>(result * value);
  }
  return result;
}

// Integers wrap around as they do on the device, so that they are not computed in double.
template <class T>
T reduced(T value, ncclRedOp_t operation, int ranks, double factor) {
  if constexpr (std::is_integral_v<T>) {
    using Wide = std::make_unsigned_t<T>;
    const auto wide = static_cast<std::uint64_t>(static_cast<Wide>(value));
    switch (operation) {
      case ncclSum:
        return static_cast<T>(wide * static_cast<std::uint64_t>(ranks));
      case ncclProd:
        return static_cast<T>(power<std::uint64_t>(wide, ranks));
      default:
        return static_cast<T>(wide * static_cast<std::uint64_t>(static_cast<std::int64_t>(factor)) *
                              static_cast<std::uint64_t>(ranks));
    }
  } else {
    const auto wide = static_cast<double>(value);
    const double result = operation == ncclSum    ? wide * ranks
                          : operation == ncclProd ? std::pow(wide, ranks)
                                                  : wide * factor * ranks;
    if constexpr (std::is_floating_point_v<T>) {
      return static_cast<T>(result);
    } else {
      return T::from(result);
    }
  }
}

template <class T>
T from_double(double value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(value);
  } else {
    return T::from(value);
  }
}

// Everything that is neither a product nor an extreme is a sum.
template <class T>
T combined(T a, T b, ncclRedOp_t operation) {
  using Wide = std::conditional_t<std::is_integral_v<T>, T, double>;
  const auto wide_a = static_cast<Wide>(a);
  const auto wide_b = static_cast<Wide>(b);
  if (operation == ncclMax || operation == ncclMin) {
    return (wide_a < wide_b) == (operation == ncclMax) ? b : a;
  }
  if constexpr (std::is_integral_v<T>) {
    const auto x = static_cast<std::uint64_t>(a);
    const auto y = static_cast<std::uint64_t>(b);
    return static_cast<T>(operation == ncclProd ? x * y : x + y);
  } else {
    return from_double<T>(operation == ncclProd ? wide_a * wide_b : wide_a + wide_b);
  }
}

double read_scalar(const void* scalar, ncclDataType_t type) {
  double value = 1;
  dispatch(type, [&](auto zero) { value = static_cast<double>(load<decltype(zero)>(scalar)); });
  return value;
}

std::optional<double> factor_of(ncclRedOp_t operation) {
  const std::lock_guard lock(scaled().mutex);
  const auto found = scaled().sums.find(operation);
  if (found == scaled().sums.end()) {
    return std::nullopt;
  }
  const ScaledSum& sum = found->second;
  return sum.scalar == nullptr ? sum.factor : read_scalar(sum.scalar, sum.type);
}

}  // namespace

std::size_t element_size(ncclDataType_t type) {
  if (type == ncclFloat8e4m3 || type == ncclFloat8e5m2) {
    return 1;
  }
  std::size_t size = 0;
  dispatch(type, [&](auto zero) { size = sizeof zero; });
  return size;
}

ncclRedOp_t create_scaled_sum(const void* scalar, ncclDataType_t type, bool on_device) {
  const std::lock_guard lock(scaled().mutex);
  auto& sums = scaled().sums;
  const int operation = sums.empty() ? static_cast<int>(ncclNumOps) : sums.rbegin()->first + 1;
  sums[operation] =
      on_device ? ScaledSum{scalar, 1, type} : ScaledSum{nullptr, read_scalar(scalar, type), type};
  return static_cast<ncclRedOp_t>(operation);
}

bool destroy_scaled_sum(ncclRedOp_t operation) {
  const std::lock_guard lock(scaled().mutex);
  return scaled().sums.erase(operation) == 1;
}

void reduce_alike(void* values, std::size_t count, ncclDataType_t type, ncclRedOp_t operation,
                  int ranks) {
  if (operation == ncclMax || operation == ncclMin || operation == ncclAvg) {
    return;
  }
  const double factor = factor_of(operation).value_or(1);
  dispatch(type, [&](auto zero) {
    using T = decltype(zero);
    auto* const at = static_cast<char*>(values);
    for (std::size_t index = 0; index < count; ++index) {
      const T result = reduced(load<T>(at + index * sizeof(T)), operation, ranks, factor);
      std::memcpy(at + index * sizeof(T), &result, sizeof(T));
    }
  });
}

void combine(void* into, const void* values, std::size_t count, ncclDataType_t type,
             ncclRedOp_t operation) {
  dispatch(type, [&](auto zero) {
    using T = decltype(zero);
    for (std::size_t index = 0; index < count; ++index) {
      auto* const at = static_cast<char*>(into) + index * sizeof(T);
      const T result = combined(
          load<T>(at), load<T>(static_cast<const char*>(values) + index * sizeof(T)), operation);
      std::memcpy(at, &result, sizeof(T));
    }
  });
}

void finish(void* values, std::size_t count, ncclDataType_t type, ncclRedOp_t operation,
            int ranks) {
  const double factor = operation == ncclAvg ? 1.0 / ranks : factor_of(operation).value_or(1);
  if (factor == 1) {
    return;
  }
  dispatch(type, [&](auto zero) {
    using T = decltype(zero);
    for (std::size_t index = 0; index < count; ++index) {
      auto* const at = static_cast<char*>(values) + index * sizeof(T);
      const T result = from_double<T>(static_cast<double>(load<T>(at)) * factor);
      std::memcpy(at, &result, sizeof(T));
    }
  });
}

}  // namespace opacus_memprof::virtual_gpu
