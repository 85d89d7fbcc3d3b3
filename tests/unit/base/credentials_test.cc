#include "base/credentials.h"

#include "base/status.h"
#include "base/subprocess.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(TokenTable, FindsTheOwnerAndIgnoresCommentsAndBlankLines) {
  const auto table = TokenTable::Parse(
      "# tokens\n\n0123456789abcdef operator alice\n  fedcba9876543210 viewer bob  \n", "tokens");
  ASSERT_TRUE(table.ok()) << ToString(table.status());
  ASSERT_EQ(table->size(), 2u);
  EXPECT_EQ(table->Find("0123456789abcdef")->name, "alice");
  EXPECT_EQ(table->Find("0123456789abcdef")->role, Role::kOperator);
  EXPECT_EQ(table->Find("fedcba9876543210")->role, Role::kViewer);
  EXPECT_EQ(table->Find("0123456789abcdeX"), nullptr);
  EXPECT_EQ(table->Find(""), nullptr);
}

TEST(TokenTable, ErrorsNameTheLineAndNeverTheToken) {
  struct Case {
    const char* text;
    const char* expected;
  };
  for (const Case& c : {Case{"0123456789abcdef operator\n", "tokens:1: want"},
                        Case{"0123456789abcdef operator a b\n", "tokens:1: want"},
                        Case{"\n0123456789abcdef admin a\n", "tokens:2: unknown role \"admin\""},
                        Case{"operator 0123456789abcdef a\n", "tokens:1: unknown role;"},
                        Case{"short viewer a\n", "at least 16"},
                        Case{"0123456789abcdef viewer a\n0123456789abcdef viewer b\n",
                             "tokens:2: token of b is the same as that of a"}}) {
    const absl::Status status = TokenTable::Parse(c.text, "tokens").status();
    EXPECT_THAT(Message(status), HasSubstr(c.expected)) << c.text;
    EXPECT_THAT(Message(status), Not(HasSubstr("0123456789abcdef")));
  }
  EXPECT_THAT(Message(TokenTable::Load("/no/file", PosixFileSystem::Get()).status()),
              HasSubstr("/no/file"));
}

TEST(Credentials, ConstantTimeEqualsIsEquality) {
  EXPECT_TRUE(ConstantTimeEquals("", ""));
  EXPECT_TRUE(ConstantTimeEquals("abc", "abc"));
  EXPECT_FALSE(ConstantTimeEquals("abc", "abd"));
  EXPECT_FALSE(ConstantTimeEquals("abc", "ab"));
}

TEST(Credentials, SecretIsTheFirstLineWithoutSpaces) {
  const TempDir dir;
  PosixFileSystem& fs = PosixFileSystem::Get();
  ASSERT_TRUE(fs.WriteFileAtomic(dir.File("t"), " secret \nrest\n").ok());
  EXPECT_EQ(*LoadSecret(dir.File("t"), fs), "secret");
  ASSERT_TRUE(fs.WriteFileAtomic(dir.File("t"), "\n").ok());
  EXPECT_THAT(Message(LoadSecret(dir.File("t"), fs).status()), HasSubstr(dir.File("t")));
}

void MakeKeyPair(const TempDir& dir, const std::string& name) {
  auto openssl = Subprocess::Spawn(
      {.argv = {"openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
                "-nodes", "-keyout", dir.File(name + ".key"), "-out", dir.File(name + ".crt"),
                "-days", "1", "-subj", "/CN=" + name},
       .stderr_path = dir.File("openssl.log")});
  ASSERT_TRUE(openssl.ok()) << ToString(openssl.status());
  const auto exit = (*openssl)->Wait(DeadlineAfter(std::chrono::seconds(60)));
  ASSERT_TRUE(exit.has_value() && exit->success());
}

TEST(LoadTls, AcceptsAMatchingSetAndExplainsEveryMismatch) {
  const TempDir dir;
  MakeKeyPair(dir, "a");
  MakeKeyPair(dir, "b");
  PosixFileSystem& fs = PosixFileSystem::Get();
  const TlsFiles good = {
      .cert_path = dir.File("a.crt"), .key_path = dir.File("a.key"), .ca_path = dir.File("b.crt")};
  const auto tls = LoadTls(good, fs);
  ASSERT_TRUE(tls.ok()) << ToString(tls.status());
  EXPECT_THAT(tls->key_pem, HasSubstr("PRIVATE KEY"));

  TlsFiles bad = good;
  bad.key_path = dir.File("b.key");
  EXPECT_THAT(Message(LoadTls(bad, fs).status()), HasSubstr("does not belong to"));
  bad.key_path = dir.File("a.crt");
  EXPECT_THAT(Message(LoadTls(bad, fs).status()), HasSubstr("not a PEM private key"));
  bad = good;
  bad.ca_path = "";
  EXPECT_THAT(Message(LoadTls(bad, fs).status()), HasSubstr("no CA file given"));
  bad.ca_path = dir.File("none");
  EXPECT_THAT(Message(LoadTls(bad, fs).status()), HasSubstr(dir.File("none")));
  bad = good;
  bad.cert_path = dir.File("a.key");
  EXPECT_THAT(Message(LoadTls(bad, fs).status()), HasSubstr("not a PEM certificate"));
}

}  // namespace
}  // namespace octavo
