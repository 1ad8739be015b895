// SPDX-License-Identifier: Apache-2.0
#include "allocators/cuda_history.h"

#include <exception>

#include "allocators/reporting.h"
#include "core/names.h"

namespace opacus_memprof {

namespace cca = c10::cuda::CUDACachingAllocator;

#if defined(OPACUS_MEMPROF_HAS_supportsUserMetadata) && defined(OPACUS_MEMPROF_HAS_annotateMemory)

namespace {

std::string text_of(std::uint8_t category, std::uint16_t module) {
  std::string text = "category=" + names().name(Names::Kind::category, category);
  const std::string name = names().name(Names::Kind::module, module);
  if (!name.empty()) text += " module=" + name;
  return text;
}

}  // namespace

void HistoryTag::set(bool workspace) noexcept {
  try {
    if (!upstream_->supportsUserMetadata()) {
      upstream_ = nullptr;
      return;
    }
    const Tag tag = tag_of_allocation(workspace);
    original_ = upstream_->getUserMetadata();
    const std::string ours = text_of(tag.category, tag.module);
    upstream_->setUserMetadata(original_.empty() ? ours : original_ + " " + ours);
  } catch (const std::exception&) {
    upstream_ = nullptr;  // the history has no entry then
  }
}

void HistoryTag::restore() noexcept {
  try {
    upstream_->setUserMetadata(original_);
  } catch (const std::exception&) {
    // There was no memory for a short text: from here on the program's own metadata is empty.
  }
}

void annotate_history(cca::CUDAAllocator& upstream, const void* pointer, std::uint8_t category,
                      std::uint16_t module) noexcept {
  try {
    const std::uint16_t known =
        module == kKeep16 ? recorder().module_of(address_of(pointer)) : module;
    if (upstream.supportsUserMetadata()) upstream.annotateMemory(pointer, text_of(category, known));
  } catch (const std::exception&) {
    // The history has no entry then.
  }
}

#else

void HistoryTag::set(bool /*workspace*/) noexcept { upstream_ = nullptr; }
void HistoryTag::restore() noexcept {}
void annotate_history(cca::CUDAAllocator& /*upstream*/, const void* /*pointer*/,
                      std::uint8_t /*category*/, std::uint16_t /*module*/) noexcept {}

#endif

}  // namespace opacus_memprof
