// SPDX-License-Identifier: Apache-2.0
// What to change, and what this profile cannot know.

function findingsCard({ profile, deviceName }) {
  const findings = profile.findings.filter(({ device }) => !device || device === deviceName);
  if (!findings.length) return null;
  const items = findings.map((finding) =>
    element(
      "li",
      { class: "finding", "data-kind": finding.kind },
      element(
        "h3",
        {},
        words(finding.kind),
        finding.module ? [" in ", element("code", {}, finding.module)] : null,
        finding.bytes ? [" · ", bytes(finding.bytes)] : null,
      ),
      element("p", { class: "evidence" }, finding.evidence),
      element("p", { class: "remedy" }, element("strong", {}, "Remedy "), finding.remedy),
    ),
  );
  return card("findings", plural(findings.length, "finding"), element("ul", {}, items));
}

function warningsCard({ profile }) {
  if (!profile.warnings.length) return null;
  const items = profile.warnings.map((warning) => element("li", {}, warning));
  const warnings = card("warnings", plural(items.length, "warning"), element("ul", {}, items));
  warnings.classList.add("caution");
  return warnings;
}
