// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/machine/kernels.h"

#include <cxxabi.h>
#include <elf.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <regex>

#include "virtual_gpu/machine/common.h"

namespace opacus_memprof::virtual_gpu {
namespace {

constexpr std::string_view kInfo = ".nv.info.";  // and the name of the kernel
constexpr std::uint8_t kHasSize = 4;             // of an attribute: a size of 2 bytes, and a value
constexpr std::uint8_t kParameter = 0x17;        // EIATTR_KPARAM_INFO

// Index, ordinal and offset, and the size in the upper bits of the last word.
struct ParameterInfo {
  std::uint32_t index;
  std::uint16_t ordinal;
  std::uint16_t offset;
  std::uint32_t flags;
};

Parameters parameters_in_section(const std::uint8_t* at, const std::uint8_t* end) {
  std::map<std::uint16_t, Parameter> found;
  while (at + 4 <= end) {
    std::uint16_t value = 0;
    std::memcpy(&value, at + 2, sizeof value);
    if (at[0] == kHasSize && at[1] == kParameter && at + 4 + sizeof(ParameterInfo) <= end) {
      ParameterInfo info;
      std::memcpy(&info, at + 4, sizeof info);
      found[info.ordinal] = {info.offset, info.flags >> 18};
    }
    at += 4 + (at[0] == kHasSize ? value : 0);
  }
  Parameters all;
  for (const auto& [ordinal, parameter] : found) all.push_back(parameter);
  return all;
}

std::map<std::string, Parameters> parameters_in_cubin(const std::uint8_t* image) {
  std::map<std::string, Parameters> all;
  const auto& header = *reinterpret_cast<const Elf64_Ehdr*>(image);
  if (header.e_ident[EI_CLASS] != ELFCLASS64) return all;
  const auto* const sections = reinterpret_cast<const Elf64_Shdr*>(image + header.e_shoff);
  const auto* const names =
      reinterpret_cast<const char*>(image + sections[header.e_shstrndx].sh_offset);
  for (std::size_t index = 0; index < header.e_shnum; ++index) {
    const std::string_view name = names + sections[index].sh_name;
    if (!name.starts_with(kInfo)) continue;
    const std::uint8_t* const begin = image + sections[index].sh_offset;
    all[std::string(name.substr(kInfo.size()))] =
        parameters_in_section(begin, begin + sections[index].sh_size);
  }
  return all;
}

std::size_t size_of(const std::string& type) {
  const auto bits = type.find_first_of("0123456789");
  return bits == std::string::npos ? 0 : std::stoul(type.substr(bits)) / 8;
}

std::map<std::string, Parameters> parameters_in_ptx(std::string_view text) {
  static const std::regex parameter(
      R"(\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+\d+)[^,\[]*(?:\[(\d+)\])?)");
  constexpr std::string_view kEntry = ".entry ";
  std::map<std::string, Parameters> all;
  for (auto at = text.find(kEntry); at != text.npos; at = text.find(kEntry, at + 1)) {
    const auto open = text.find('(', at);
    const auto close = text.find(')', at);
    if (open > close || close == text.npos) continue;
    const std::string_view name = text.substr(at + kEntry.size(), open - at - kEntry.size());
    Parameters& parameters = all[std::string(name.substr(0, name.find_last_not_of(" \n\t") + 1))];
    const std::string list(text.substr(open, close - open));
    std::size_t offset = 0;
    for (std::sregex_iterator each(list.begin(), list.end(), parameter), end; each != end; ++each) {
      const std::size_t element = size_of((*each)[2]);
      const std::size_t alignment = (*each)[1].matched ? std::stoul((*each)[1]) : element;
      offset = round_up(offset, std::max<std::size_t>(alignment, 1));
      parameters.push_back({offset, element * ((*each)[3].matched ? std::stoul((*each)[3]) : 1)});
      offset += parameters.back().size;
    }
  }
  return all;
}

// Splits the parameters of a demangled function; the last bracket that is open to the left of its
// end begins them.
std::optional<std::vector<std::string>> split_parameters(const std::string& function) {
  if (!function.ends_with(')')) return std::nullopt;
  std::vector<std::string> parameters(1);
  int depth = 0;
  for (auto at = function.rbegin(); at != function.rend(); ++at) {
    const bool closes = *at == ')' || *at == '>' || *at == '}' || *at == ']';
    const bool opens = *at == '(' || *at == '<' || *at == '{' || *at == '[';
    if (closes && depth++ == 0) continue;
    if (opens && --depth == 0) {
      for (std::string& parameter : parameters) {
        std::reverse(parameter.begin(), parameter.end());
        if (parameter.starts_with(' ')) parameter.erase(0, 1);
      }
      std::reverse(parameters.begin(), parameters.end());
      if (parameters.size() == 1 && parameters[0].empty()) parameters.clear();
      return parameters;
    }
    if (*at == ',' && depth == 1) {
      parameters.emplace_back();
    } else if (*at != ' ' || !parameters.back().empty()) {
      parameters.back() += *at;
    }
  }
  return std::nullopt;
}

std::size_t writable_bytes(const std::string& type) {
  static const std::regex number(
      R"((?:unsigned |signed )?(?:bool|char|short|int|long|long long|float|double|__half)(?: const)?)");
  if (type.ends_with("const*") || std::regex_match(type, number)) return 0;
  // Parameters of the kernel that fills new memory under torch.use_deterministic_algorithms: these
  // hold numbers, and an array holds pointers.
  static constexpr std::array<std::string_view, 4> kNumbers{
      "at::native::FillFunctor<", "at::native::memory::", "TrivialOffsetCalculator<",
      "OffsetCalculator<"};
  if (std::any_of(kNumbers.begin(), kNumbers.end(),
                  [&](auto name) { return type.starts_with(name); }))
    return 0;
  static const std::regex pointers(R"(std::array<char\*, (\d+)ul>)");
  if (std::smatch found; std::regex_match(type, found, pointers))
    return std::stoul(found[1]) * sizeof(void*);
  return type.ends_with('*') ? sizeof(void*) : kUnknownSize;
}

}  // namespace

std::map<std::string, Parameters> parameters_in(const void* image) {
  const auto* const bytes = static_cast<const std::uint8_t*>(image);
  if (std::memcmp(bytes, ELFMAG, SELFMAG) == 0) return parameters_in_cubin(bytes);
  const auto* const text = static_cast<const char*>(image);
  if (std::isspace(*bytes) != 0 || *text == '/' || *text == '.') return parameters_in_ptx(text);
  return {};
}

std::optional<std::vector<std::size_t>> writable_parameters(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), &std::free);
  if (status != 0) return std::nullopt;
  const auto parameters = split_parameters(name.get());
  if (!parameters) return std::nullopt;
  std::vector<std::size_t> bytes;
  for (const std::string& type : *parameters) bytes.push_back(writable_bytes(type));
  return bytes;
}

}  // namespace opacus_memprof::virtual_gpu
