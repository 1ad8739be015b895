// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "virtual_gpu/cudnn/convolutions.h"

namespace opacus_memprof::virtual_gpu {
namespace {

// A line of cudnn_workspaces.tsv. Each field of sizes holds the measured batch sizes in ascending
// order, each with its bytes or with "=" where cuDNN's choice without a GPU is the measured one:
// "8:393232 16= 32=". A single "=" stands for all batch sizes; an empty field has none.
struct Row {
  std::string_view convolution;  // without the batch size
  std::string_view forward, data, filter;
};

// Returns the text up to the next tab or the end of the line, and removes it from `line`.
std::string_view next_field(std::string_view& line) {
  const std::size_t end = std::min(line.find('\t'), line.size());
  const std::string_view field = line.substr(0, end);
  line.remove_prefix(std::min(end + 1, line.size()));
  return field;
}

// The package keeps the table one folder above this library.
std::filesystem::path table_file() {
  Dl_info library{};
  dladdr(reinterpret_cast<const void*>(&table_file), &library);
  return std::filesystem::path(library.dli_fname).parent_path().parent_path() /
         "cudnn_workspaces.tsv";
}

// The measured workspaces. Without the file cuDNN's own choices are used, as they are while the
// table is measured.
class Table {
 public:
  explicit Table(const std::filesystem::path& file) {
    std::ifstream stream(file, std::ios::binary);
    text_.assign(std::istreambuf_iterator<char>(stream), {});
    if (text_.empty()) {
      std::fprintf(stderr, "virtual GPU: %s is missing: cuDNN's workspaces are estimated\n",
                   file.c_str());
    }
    for (std::size_t start = 0; start < text_.size();) {
      const std::size_t end = std::min(text_.find('\n', start), text_.size());
      if (text_[start] != '#') {
        lines_.push_back(std::string_view(text_).substr(start, end - start));
      }
      start = end + 1;
    }
  }

  [[nodiscard]] bool empty() const { return lines_.empty(); }

  [[nodiscard]] std::optional<Row> find(std::string_view convolution) const {
    const auto found = std::lower_bound(
        lines_.begin(), lines_.end(), convolution,
        [](std::string_view line, std::string_view wanted) { return next_field(line) < wanted; });
    if (found == lines_.end()) {
      return std::nullopt;
    }
    std::string_view line = *found;
    Row row;
    row.convolution = next_field(line);
    row.forward = next_field(line);
    row.data = next_field(line);
    row.filter = next_field(line);
    return row.convolution == convolution ? std::optional(row) : std::nullopt;
  }

 private:
  std::string text_;
  std::vector<std::string_view> lines_;  // sorted
};

// Read when a convolution first asks for its workspace; never destroyed, as the machine is not.
const Table& measured() {
  static const auto* const only = new Table(table_file());
  return *only;
}

void append(std::string& key, const std::vector<std::int64_t>& numbers) {
  for (std::size_t index = 0; index < numbers.size(); ++index) {
    key += std::to_string(numbers[index]);
    key += index + 1 < numbers.size() ? 'x' : ' ';
  }
}

const char* type_name(cudnnDataType_t type, Multiply multiply) {
  switch (type) {
    case CUDNN_DATA_HALF:
      return "fp16";
    case CUDNN_DATA_BFLOAT16:
      return "bf16";
    case CUDNN_DATA_FLOAT:
      return multiply == Multiply::tensor_cores ? "tf32" : "fp32";
    default:
      return "other";
  }
}

struct Key {
  std::string convolution;
  std::int64_t batch;
};

// The groups of a call for one sample, which may stand for samples (functorch's vmap), are a batch
// size too.
Key key_of(const Convolution& convolution, Multiply multiply) {
  std::vector<std::int64_t> input(convolution.input.begin() + 1, convolution.input.end());
  std::vector<std::int64_t> weight = convolution.weight;
  Key key{"", convolution.input[0]};
  const std::int64_t groups = input[0] / weight[1];
  if (key.batch == 1 && groups > 1 && weight[0] % groups == 0) {
    key = {"g", groups};
    input[0] = weight[1];
    weight[0] /= groups;
  }
  append(key.convolution, input);
  append(key.convolution, weight);
  append(key.convolution, convolution.stride);
  append(key.convolution, convolution.padding);
  append(key.convolution, convolution.dilation);
  key.convolution += type_name(convolution.type, multiply);
  key.convolution += convolution.channels_last ? " last" : " first";
  return key;
}

std::string_view field_of(const Row& row, Direction direction) {
  switch (direction) {
    case Direction::forward:
      return row.forward;
    case Direction::data:
      return row.data;
    default:
      return row.filter;
  }
}

std::int64_t number_at(std::string_view text, std::size_t& position) {
  std::int64_t number = 0;
  position += position < text.size() && text[position] == ' ' ? 1 : 0;
  for (; position < text.size() && text[position] >= '0' && text[position] <= '9'; ++position) {
    number = number * 10 + (text[position] - '0');
  }
  return number;
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct Measured {
  std::int64_t batch;
  std::optional<std::int64_t> bytes;  // none where they are cuDNN's choice
};

// A batch size between two lies on the line between them, and beyond the largest the workspace
// grows with it. Between a number and cuDNN's choice it is what the larger one has.
Workspace workspace_in(std::string_view measured, std::int64_t batch, std::int64_t chosen) {
  Measured below{0, std::nullopt};
  Measured last{0, std::nullopt};
  for (std::size_t position = 0; position < measured.size() && last.batch < batch; ++position) {
    below = last;
    last = {number_at(measured, position), std::nullopt};
    if (measured[position++] != '=') {
      last.bytes = number_at(measured, position);
    }
  }
  const bool found = last.batch == batch || measured == "=";
  if (!last.bytes) {
    return {chosen, found};
  }
  if (last.batch < batch) {
    return {divide_up(*last.bytes * batch, last.batch)};
  }
  if (found || !below.bytes) {
    return {*last.bytes, found};
  }
  return {divide_up(*below.bytes * (last.batch - batch) + *last.bytes * (batch - below.batch),
                    last.batch - below.batch)};
}

constexpr std::int64_t kSum = 4;  // bytes of a number of fp32, in which gradients are summed

bool all(const std::vector<std::int64_t>& numbers, std::size_t from, std::int64_t value) {
  return std::all_of(numbers.begin() + static_cast<std::ptrdiff_t>(from), numbers.end(),
                     [value](std::int64_t number) { return number == value; });
}

// A convolution with kernels of one element over planes is a product of matrices for each sample,
// which cuBLASLt does in place where a plane is large and aligned well enough; the gradient of the
// weights is summed over the samples in fp32. Without a GPU cuDNN does not ask cuBLASLt and chooses
// an engine that transposes all tensors first. Nothing where its choice is the one with a GPU.
std::optional<std::int64_t> product_workspace(const Convolution& convolution, Multiply multiply) {
  constexpr std::int64_t kAligned = 8;  // bytes
  constexpr std::int64_t kLarge = 64;   // numbers
  const bool product = all(convolution.weight, 2, 1) && all(convolution.stride, 0, 1) &&
                       all(convolution.padding, 0, 0) &&
                       convolution.input[1] == convolution.weight[1];
  if (multiply != Multiply::tensor_cores || !product || convolution.channels_last) {
    return std::nullopt;
  }
  std::int64_t plane = 1;
  for (std::size_t index = 2; index < convolution.input.size(); ++index) {
    plane *= convolution.input[index];
  }
  const bool wide = convolution.type == CUDNN_DATA_FLOAT;
  if (plane * (wide ? 4 : 2) % kAligned != 0) {
    const bool in_place =
        convolution.direction == Direction::data ||
        (convolution.direction == Direction::forward && (wide || plane >= kLarge));
    return in_place ? std::optional<std::int64_t>(0) : std::nullopt;
  }
  if (plane < kLarge) {
    return std::nullopt;
  }
  if (convolution.direction != Direction::filter) {
    return 0;
  }
  return convolution.input[0] * convolution.weight[0] * convolution.weight[1] * kSum;
}

// Rows and columns of a tile, by cuDNN's number for its size; {0, 0} for numbers that no measured
// engine has used.
constexpr std::array<std::array<std::int64_t, 2>, 10> kTiles{{{128, 128},
                                                              {128, 64},
                                                              {0, 0},
                                                              {256, 128},
                                                              {256, 64},
                                                              {64, 64},
                                                              {128, 256},
                                                              {64, 128},
                                                              {0, 0},
                                                              {64, 256}}};

// The number of blocks that run at once on an H100, by the number of blocks in a cluster. It is
// below 132, the number of multiprocessors, because a cluster has to fit into a group of about 16.
constexpr std::array<std::int64_t, 9> kAtOnce{0, 132, 132, 117, 120, 110, 102, 105, 120};
constexpr std::int64_t kOfMultiprocessors = 132;
constexpr std::int64_t kAtOnceWithoutGpu = 18;  // as cuDNN assumes

constexpr std::int64_t kFew = 8;  // parts of a tile

// Returns how many partial sums are kept. Blocks compute tiles of the result in turns. If the last
// turn has too few tiles for all blocks, several blocks share a tile, and each keeps a partial sum.
std::int64_t parts(std::int64_t tiles, std::int64_t at_once, std::int64_t most,
                   std::int64_t most_of_few = kFew) {
  const std::int64_t last = tiles <= at_once ? tiles : tiles % at_once;
  std::int64_t each = last == 0 ? 0 : std::min(at_once / last, std::max<std::int64_t>(1, most));
  if (most_of_few < kFew && each <= kFew) {
    each = std::min(most_of_few,
                    static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(each))));
  }
  return each > 1 ? last * each : 0;
}

// Returns the most parts of a tile of bf16 gradients, if it has few parts, by the number of
// summands. Measured on an H100.
std::int64_t most_of_few(std::int64_t summands) {
  constexpr std::int64_t kAll = 65536;
  if (summands >= kAll) {
    return kFew;
  }
  return summands * 5 >= kAll * 2 ? 4 : summands * 5 >= kAll ? 2 : 1;
}

std::int64_t round_up(std::int64_t number, std::int64_t multiple) {
  return divide_up(number, multiple) * multiple;
}

// Returns by how many bytes partial sums are larger on a GPU than cuDNN assumes without one: there
// it does not know how many blocks run at once.
std::int64_t missing_parts(const Convolution& convolution, const Split& split,
                           std::int64_t multiprocessors) {
  const std::int64_t cluster = split.rows * split.columns;
  if (split.tile < 0 || split.tile >= std::ssize(kTiles) || cluster < 1 ||
      cluster >= std::ssize(kAtOnce)) {
    return 0;
  }
  const auto [rows, columns] = kTiles[static_cast<std::size_t>(split.tile)];
  if (rows == 0) {
    return 0;
  }
  const std::int64_t outside = convolution.weight[0];  // channels
  const std::int64_t inside = convolution.weight[1];
  std::int64_t taps = 1;  // of the kernel
  std::int64_t pixels_in = convolution.input[0];
  std::int64_t pixels_out = convolution.input[0];
  for (std::size_t index = 2; index < convolution.input.size(); ++index) {
    const std::int64_t extent =
        convolution.dilation[index - 2] * (convolution.weight[index] - 1) + 1;
    taps *= convolution.weight[index];
    pixels_in *= convolution.input[index];
    pixels_out *= (convolution.input[index] + 2 * convolution.padding[index - 2] - extent) /
                      convolution.stride[index - 2] +
                  1;
  }
  std::int64_t down = 0;  // tiles
  std::int64_t across = 0;
  std::int64_t most = 0;  // parts of a tile: each has at least so many summands
  std::int64_t few = kFew;
  if (convolution.direction == Direction::filter) {
    down = divide_up(outside, rows);
    across = divide_up(inside, columns) * taps;
    most = pixels_out / 1024;
    few = convolution.type == CUDNN_DATA_BFLOAT16 ? most_of_few(pixels_out) : kFew;
  } else {
    const bool forward = convolution.direction == Direction::forward;
    down = divide_up(forward ? pixels_out : pixels_in, rows);
    across = divide_up(forward ? outside : inside, columns);
    most = (forward ? inside : outside) * taps / 256;
  }
  const std::int64_t tiles = round_up(down, split.rows) * round_up(across, split.columns);
  const auto whole = [cluster](std::int64_t blocks) { return blocks / cluster * cluster; };
  const std::int64_t at_once =
      whole(kAtOnce[static_cast<std::size_t>(cluster)] * multiprocessors / kOfMultiprocessors);
  return (parts(tiles, at_once, most, few) - parts(tiles, whole(kAtOnceWithoutGpu), most)) * rows *
         columns * kSum;
}

}  // namespace

std::string description(const Convolution& convolution, Multiply multiply) {
  const Key key = key_of(convolution, multiply);
  return std::to_string(key.batch) + ' ' + key.convolution +
         static_cast<char>(convolution.direction);
}

std::optional<Workspace> measured_workspace(const Convolution& convolution, Multiply multiply,
                                            std::int64_t chosen) {
  if (convolution.input.size() < 2 || convolution.weight.size() < 2) {
    return std::nullopt;
  }
  const Key key = key_of(convolution, multiply);
  const std::optional<Row> found = measured().find(key.convolution);
  if (!found) {
    return std::nullopt;
  }
  const std::string_view field = field_of(*found, convolution.direction);
  if (field.empty()) {
    return std::nullopt;
  }
  return workspace_in(field, key.batch, chosen);
}

std::int64_t estimated_workspace(const Convolution& convolution, Multiply multiply,
                                 const std::optional<Split>& split, std::int64_t multiprocessors,
                                 std::int64_t chosen) {
  if (measured().empty()) {
    return chosen;
  }
  if (const auto bytes = product_workspace(convolution, multiply)) {
    return *bytes;
  }
  // In half precision the engines of the other two directions were not found to follow this.
  const bool followed =
      convolution.direction == Direction::filter || convolution.type == CUDNN_DATA_FLOAT;
  if (!split || !followed || convolution.input[1] != convolution.weight[1]) {
    return chosen;
  }
  return std::max<std::int64_t>(0, chosen + missing_parts(convolution, *split, multiprocessors));
}

}  // namespace opacus_memprof::virtual_gpu
