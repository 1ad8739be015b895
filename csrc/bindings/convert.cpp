// SPDX-License-Identifier: Apache-2.0
#include "bindings/convert.h"

#include <pybind11/stl.h>

#include "core/names.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

// Built-in categories always, the program's own as far as they hold bytes or ever did.
py::dict categories_to_python(const CategoryBytes& bytes) {
  const auto all = names().list(Names::Kind::category);
  py::dict result;
  for (std::size_t id = 0; id < all.size(); ++id) {
    result[py::str(all[id])] = bytes[id];
  }
  return result;
}

void add_state(py::dict& result, const Recorder::State& state) {
  py::dict devices;
  for (const auto& device : state.devices) {
    py::dict entry;
    entry["requested_bytes"] = device.requested;
    entry["categories"] = categories_to_python(device.categories);
    devices[py::str(device_name(device.device))] = entry;
  }
  result["unix_ns"] = state.unix_ns;
  result["step"] = state.step;
  result["logical_step"] = state.logical_step;
  result["devices"] = devices;
}

}  // namespace

py::dict to_python(const Recorder::State& state) {
  py::dict result;
  add_state(result, state);
  for (const auto& device : state.devices) {
    const py::object entry = result["devices"][py::str(device_name(device.device))];
    entry["peak_bytes"] = device.highest;
    entry["phase"] = kPhaseNames[device.phase];
  }
  return result;
}

py::dict to_python(const Recorder::Snapshot& snapshot, const std::string& name) {
  py::dict result;
  result["index"] = snapshot.index;
  result["name"] = name;
  add_state(result, snapshot);
  return result;
}

py::dict to_python(const std::vector<Recorder::DevicePeak>& peaks) {
  py::dict result;
  for (const auto& [device, peak] : peaks) {
    py::dict entry;
    entry["requested_bytes"] = peak.requested;
    entry["upstream_requested_bytes"] = peak.upstream_requested;
    entry["allocated_bytes"] = peak.upstream_allocated;
    entry["reserved_bytes"] = peak.upstream_reserved;
    entry["step"] = peak.step;
    entry["phase"] = kPhaseNames[peak.phase];
    entry["unix_ns"] = peak.unix_ns;
    entry["categories"] = categories_to_python(peak.categories);
    result[py::str(device_name(device))] = entry;
  }
  return result;
}

py::list to_python(const std::vector<Block>& blocks) {
  const auto categories = names().list(Names::Kind::category);
  const auto modules = names().list(Names::Kind::module);
  const auto ops = names().list(Names::Kind::op);
  const auto threads = names().list(Names::Kind::thread);
  const auto streams = names().list(Names::Kind::stream);
  py::list result;
  for (const Block& block : blocks) {
    py::dict entry;
    entry["address"] = block.address;
    entry["bytes"] = block.size();
    entry["category"] = categories[block.category()];
    entry["phase"] = kPhaseNames[block.phase];
    entry["module"] = modules[block.module];
    entry["op"] = ops[block.op];
    entry["step"] = block.step;
    entry["device"] = device_name(block.device);
    entry["stream"] = streams[block.stream];
    entry["thread"] = threads[block.thread];
    entry["seeded"] = block.seeded;
    result.append(entry);
  }
  return result;
}

py::list to_python(const std::vector<Failure>& failures) {
  const auto categories = names().list(Names::Kind::category);
  const auto modules = names().list(Names::Kind::module);
  const auto ops = names().list(Names::Kind::op);
  const auto known = [](std::int64_t bytes) {
    return bytes < 0 ? py::object(py::none()) : py::object(py::int_(bytes));
  };
  py::list result;
  for (const Failure& failure : failures) {
    py::list holdings;
    for (const Holding& one : failure.holdings) {
      py::dict holding;
      holding["bytes"] = one.bytes;
      holding["blocks"] = one.blocks;
      holding["largest"] = one.largest;
      holding["category"] = categories[one.category];
      holding["module"] = modules[one.module];
      holding["op"] = ops[one.op];
      holding["phase"] = kPhaseNames[one.phase];
      holding["step"] = one.step;
      holdings.append(holding);
    }
    const UpstreamAtFailure& said = failure.upstream;
    py::dict upstream;
    upstream["reserved"] = known(said.reserved);
    upstream["allocated"] = known(said.allocated);
    upstream["pending"] = known(said.pending);
    upstream["largest_free"] = known(said.largest_free);
    upstream["free_segments"] = known(said.free_segments);
    upstream["free_expandable"] = known(said.free_expandable);
    upstream["device_free"] = known(said.device_free);
    upstream["device_total"] = known(said.device_total);
    upstream["limit"] = known(said.limit);
    py::dict entry;
    entry["number"] = failure.number;
    entry["requested"] = failure.requested;
    entry["unix_ns"] = failure.unix_ns;
    entry["step"] = failure.step;
    entry["logical_step"] = failure.logical_step;
    entry["device"] = device_name(failure.device);
    entry["category"] = categories[failure.tag.category];
    entry["phase"] = kPhaseNames[failure.tag.phase];
    entry["module"] = modules[failure.tag.module];
    entry["op"] = ops[failure.tag.op];
    entry["holdings"] = holdings;
    entry["upstream"] = upstream;
    result.append(entry);
  }
  return result;
}

}  // namespace opacus_memprof
